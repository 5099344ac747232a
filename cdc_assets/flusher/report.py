"""What a flusher says of itself: for its log, for ``status``, and for Prometheus.

The session writes :class:`Progress` while it works; a :class:`Report` is what was true at one
moment, together with what a probe of the source said. It goes as JSON into the coordination
database, where any process can read it, with the server's time beside it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from cdc_assets.errors import first_line
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


STATES = ("starting", "waiting", "streaming", "retrying staging", "reconnecting", "stopped")
"""waiting: another flusher is active. retrying staging: a file can't be stored. reconnecting: a
connection was lost."""


@dataclass(slots=True)
class Progress:
    """What was done so far, over all sessions of a run; written by sessions, read by anybody.

    ``state`` says what is done or waited for now (STATES), ``since`` when it began. ``last_error``
    stays when its state is over. ``changes`` counts by table and ``_op``.
    """

    state: str = "starting"
    since: datetime = field(default_factory=lambda: datetime.now(UTC))
    last_error: str | None = None
    sessions: int = 0
    staging_retries: int = 0
    received: Lsn = Lsn.ZERO
    flushed: Lsn = Lsn.ZERO
    acknowledged: Lsn = Lsn.ZERO
    rows: int = 0
    files: int = 0
    staged_bytes: int = 0
    received_bytes: int = 0
    in_flight_bytes: int = 0
    waiting_bytes: int = 0
    decoder_pid: int | None = None
    durations: Durations = field(default_factory=Durations)
    changes: Counter[tuple[str, str]] = field(default_factory=Counter)
    bytes_by_table: Counter[str] = field(default_factory=Counter)

    @property
    def reconnects(self) -> int:
        """How often the stream was begun anew."""
        return max(0, self.sessions - 1)

    def enter(self, state: str, error: BaseException | str | None = None) -> None:
        """Note a change of state, and what caused it."""
        if error is not None:
            self.last_error = error if isinstance(error, str) else first_line(error)
        if state != self.state:
            self.state, self.since = state, datetime.now(UTC)


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
