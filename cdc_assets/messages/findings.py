"""Findings about a source: one thing each that is wrong, or worth knowing, and its remedy.

``check`` prints findings, and the flusher refuses to stream because of them. Both use the same
codes, which never change.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found; ``remedy`` says what to do about it.

    ``table``: the SQL name of the table that it is about, None for all of the source.
    """

    code: str
    severity: Severity
    message: str
    remedy: str
    table: str | None = None

    def to_json(self) -> dict[str, str | None]:
        return asdict(self)
