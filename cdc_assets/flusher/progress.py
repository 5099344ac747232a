"""A flusher's report of itself: for its log, for ``status``, and for Prometheus.

Sessions write :class:`Progress` while they work. A :class:`Report` is the progress at one moment
together with the last probe of the source. It is stored as JSON in the coordination database,
with the server's time beside it, where any process can read it.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any

from cdc_assets.errors import first_line
from cdc_assets.flusher.stage.staging import WrittenRows
from cdc_assets.messages.texts import counted
from cdc_assets.postgres.lsn import PAGE_HEADER_BYTES, Lsn

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


# Positions of the source kept at most, one a probe. If the log stays behind for long, every other
# one is dropped.
MOST_SEEN = 1000

STATES = (
    *("starting", "waiting", "streaming", "retrying staging", "reconnecting", "stuck"),
    "stopped",
)
"""waiting: another flusher is active. retrying staging: a file can't be stored. reconnecting: a
connection was lost. stuck: the source fails at the same place each time."""


@dataclass(slots=True)
class Progress:
    """Progress of a run over all its sessions; sessions write it, any thread may read it.

    ``state`` is one of STATES and began at ``since``. ``last_error`` stays when its state is over.
    ``changes`` counts by table and ``_op``.
    """

    state: str = "starting"
    since: datetime = field(default_factory=lambda: datetime.now(UTC))
    last_error: str | None = None
    sessions: int = 0
    staging_retries: int = 0
    received: Lsn = Lsn.ZERO
    flushed: Lsn = Lsn.ZERO
    acknowledged: Lsn = Lsn.ZERO
    level: Lsn = Lsn.ZERO
    """The log shows the source as of this LSN; above ``flushed`` if nothing of ours is between."""
    rows: int = 0
    files: int = 0
    staged_bytes: int = 0
    in_flight_bytes: int = 0
    waiting_bytes: int = 0
    decoder_pid: int | None = None
    durations: Durations = field(default_factory=Durations)
    changes: Counter[tuple[str, str]] = field(default_factory=Counter)
    bytes_by_table: Counter[str] = field(default_factory=Counter)
    troubles: dict[str, str] = field(default_factory=dict)
    """Problems beside the stream, by the thread that has them."""
    waits: bool = False
    """Another flusher has the turn, as far as this one knows; whatever its state becomes."""
    beat: float | None = None
    """When the loop last went round (monotonic); None while nothing goes round."""
    on_state: Callable[[], None] = lambda: None
    """Called when the state has changed, in the thread that changed it."""
    _stuck_at: Lsn | None = None

    @property
    def reconnects(self) -> int:
        """How often the stream was begun anew."""
        return max(0, self.sessions - 1)

    def count(self, staged: Collection[WrittenRows], seconds: float) -> None:
        """Note a flush that is in the log; it took ``seconds`` to stage and to register."""
        self.files += len({rows.path for rows in staged})
        for rows in staged:
            name = str(rows.table)
            self.rows += rows.row_count
            self.staged_bytes += rows.byte_size
            self.bytes_by_table[name] += rows.byte_size
            for operation, count in rows.operations.items():
                self.changes[name, operation] += count
        self.durations.add(seconds)

    def enter(self, state: str, error: BaseException | str | None = None) -> None:
        """Note a change of state, and what caused it.

        A stuck flusher is streaming again only once something got into the log.
        """
        if state == "streaming" and self._stuck_at == self.flushed:
            return
        self._stuck_at = None
        if error is not None:
            self.last_error = error if isinstance(error, str) else first_line(error)
        if state != self.state:
            self.state, self.since = state, datetime.now(UTC)
            self.on_state()

    def note(self, thread: str, trouble: str | None) -> None:
        """Note what a thread beside the stream can't do, or (None) that it can again."""
        if trouble is None:
            self.troubles.pop(thread, None)
        else:
            self.troubles[thread] = trouble

    def enter_stuck(self, error: BaseException) -> None:
        """Note that the source can't send what follows ``flushed``, and why."""
        self.enter("stuck", error)
        self._stuck_at = self.flushed


@dataclass(slots=True)
class Probe:
    """The last look at the source, and how long ago the log was level with it.

    Reports and scrapes read it from threads of their own.
    """

    current: Lsn = Lsn.ZERO
    retained_bytes: int = 0
    wal_status: str | None = None
    _seen: deque[tuple[float, Lsn]] = field(default_factory=deque)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def saw(self, now: float, current: Lsn) -> None:
        """Note that the source's WAL ended at ``current`` at ``now`` (monotonic seconds)."""
        with self._lock:
            self.current = current
            self._seen.append((now, Lsn(max(0, current.value - PAGE_HEADER_BYTES))))
            if len(self._seen) > MOST_SEEN:
                self._seen = deque(list(self._seen)[::2])  # the oldest one stays

    def forget(self) -> None:
        """Know nothing of the source, as before the first look."""
        with self._lock:
            self.current, self.retained_bytes, self.wal_status = Lsn.ZERO, 0, None
            self._seen.clear()

    def lag_bytes(self, level: Lsn) -> int:
        behind = self.current - level
        return behind if behind > PAGE_HEADER_BYTES else 0

    def lag_seconds(self, now: float, level: Lsn) -> float:
        """Age of the oldest position seen that the log doesn't show; 0 if it shows all."""
        with self._lock:
            while self._seen and self._seen[0][1] <= level:
                self._seen.popleft()
            return now - self._seen[0][0] if self._seen else 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """A flusher at one moment: LSNs as Postgres prints them, sizes in bytes, times in seconds.

    Counts of the run. ``changes`` by table and operation; ``bytes`` staged, by table; ``troubles``
    by thread.
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
    troubles: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        # Not asdict: it would copy the entries of every table one by one.
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def sentence(self) -> str:
        """The same in words, for a person."""
        doing = self.state
        if self.state not in ("streaming", "stopped"):
            doing += f" since {self.since} ({self.last_error})"
        rows = sum(sum(counts.values()) for counts in self.changes.values())
        megabytes, tables = sum(self.bytes.values()) / 1e6, counted(len(self.changes), "table")
        return (
            f"{doing}: everything below {self.staged_lsn} is in the log,"
            f" {self.lag_bytes / 1e6:,.1f} MB and {self.lag_seconds:.1f} s behind the source;"
            f" {rows:,} changes of {tables}, {megabytes:,.1f} MB, in"
            f" {self.flushes:,} flushes of {self.flush_seconds_mean:.3f} s;"
            f" {counted(self.reconnects, 'reconnect')};"
            f" the slot keeps {self.retained_bytes / 1e6:,.1f} MB of"
            f" WAL ({self.wal_status or 'no slot'})"
            + "".join(f"; {thread}: {trouble}" for thread, trouble in self.troubles.items())
        )


def report(process: str, progress: Progress, probe: Probe, now: float) -> Report:
    """The report as of ``now`` (monotonic seconds)."""
    durations, level = progress.durations, max(progress.level, progress.flushed)
    changes: dict[str, dict[str, int]] = {}
    for (table, operation), count in sorted(progress.changes.copy().items()):
        changes.setdefault(table, {})[OPERATIONS[operation]] = count
    return Report(
        process,
        progress.state,
        progress.since.isoformat(timespec="seconds"),
        progress.last_error,
        str(progress.received),
        str(progress.flushed),
        str(progress.acknowledged),
        probe.lag_bytes(level),
        round(probe.lag_seconds(now, level), 3),
        probe.retained_bytes,
        probe.wal_status,
        progress.reconnects,
        progress.staging_retries,
        durations.count,
        round(durations.total_seconds / max(1, durations.count), 4),
        round(durations.last_seconds, 4),
        changes,
        dict(progress.bytes_by_table.copy()),
        progress.troubles.copy(),
    )
