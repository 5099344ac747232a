"""What a flusher says of itself: for its log, for ``status``, and for Prometheus.

The session writes :class:`Progress` while it works; a :class:`Report` is what was true at one
moment, together with what a probe of the source said. It goes as JSON into the coordination
database, where any process can read it, with the server's time beside it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from cdc_assets.postgres.lsn import Lsn

OPERATIONS = {"I": "insert", "U": "update", "D": "delete", "T": "truncate"}

# Upper bounds of a flush's duration, in seconds: the default interval is one.
FLUSH_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass(slots=True)
class Durations:
    """How long flushes took, from staging to registration: counts by bound, sum, the last one."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(FLUSH_BOUNDS) + 1))
    total_seconds: float = 0.0
    last_seconds: float = 0.0

    def add(self, seconds: float) -> None:
        place = next((i for i, bound in enumerate(FLUSH_BOUNDS) if seconds <= bound), -1)
        self.counts[place] += 1
        self.total_seconds += seconds
        self.last_seconds = seconds

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass(slots=True)
class Probe:
    """What the source said last, and so how long ago the log was level with it."""

    current: Lsn = Lsn.ZERO
    retained_bytes: int = 0
    wal_status: str | None = None
    _seen: deque[tuple[float, Lsn]] = field(default_factory=lambda: deque(maxlen=1000))

    def saw(self, now: float, current: Lsn) -> None:
        """The source's WAL ended at ``current`` at ``now`` (monotonic seconds)."""
        self.current = current
        self._seen.append((now, current))

    def lag_bytes(self, flushed: Lsn) -> int:
        return max(0, self.current - flushed)

    def lag_seconds(self, now: float, flushed: Lsn) -> float:
        """Age of the oldest position seen that isn't flushed; 0 when all that was seen is."""
        while self._seen and self._seen[0][1] <= flushed:
            self._seen.popleft()
        return now - self._seen[0][0] if self._seen else 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """One moment of a flusher. LSNs as Postgres prints them, bytes, seconds; counts of this life.

    ``changes`` by table and operation; ``bytes`` staged, by table.
    """

    process: str
    state: str
    since: str
    last_error: str | None
    received_lsn: str
    staged_lsn: str
    acknowledged_lsn: str
    lag_bytes: int
    lag_seconds: float
    retained_bytes: int
    wal_status: str | None
    reconnects: int
    staging_retries: int
    flushes: int
    flush_seconds_mean: float
    flush_seconds_last: float
    changes: Mapping[str, Mapping[str, int]]
    bytes: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
