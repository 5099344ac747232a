"""Waiting longer after each failure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """Capped exponential waiting between restarts; pure, the caller keeps the count."""

    first_seconds: float = 1.0
    cap_seconds: float = 60.0
    healthy_seconds: float = 60.0
    """A child that lived this long had started well: its end counts as the first failure."""

    def failures(self, before: int, lived_seconds: float) -> int:
        """The count of failures in a row after a child ended, having lived that long."""
        return 1 if lived_seconds >= self.healthy_seconds else before + 1

    def delay_seconds(self, failures: int) -> float:
        """How long to wait after that many failures in a row; 0 for none."""
        if failures <= 0:
            return 0.0
        # 2**64 is past any cap; without the bound a float overflows after 1,024 failures.
        doubled = self.first_seconds * 2.0 ** min(failures - 1, 64)
        return min(self.cap_seconds, doubled)
