"""The flusher as the log knows it: which process has the turn, how it is, and how far behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cdc_assets.log.asked.wishes import dropped_since
from cdc_assets.log.locks import flusher_lock
from cdc_assets.log.session import STALE_SECONDS
from cdc_assets.log.store import LogStore
from cdc_assets.messages.texts import counted
from cdc_assets.postgres.lsn import Lsn

# States in which a flusher waits for its next session to begin, without the lock of its turn.
_BETWEEN_SESSIONS = ("reconnecting", "stuck")


@dataclass(frozen=True, slots=True)
class ActiveFlusher:
    """The process that has the turn; ``str`` is its name.

    ``seconds``: the age of the session that has the lock, and ``silent_seconds`` since its last
    heartbeat; both are None for a session that nobody beats for.
    """

    process: str
    seconds: float | None = None
    silent_seconds: float | None = None

    def __str__(self) -> str:
        return self.process

    @property
    def is_silent(self) -> bool:
        """Whether it hasn't been heard of for so long that another one may take over."""
        return self.silent_seconds is not None and self.silent_seconds > STALE_SECONDS


def active_flusher(store: LogStore) -> ActiveFlusher | None:
    """The process that has the turn; None if none has it."""
    holder = store.lock_holder(flusher_lock(store.source))
    if holder is None:
        return None
    row = store.connection.execute(
        "select process, extract(epoch from clock_timestamp() - backend_start)::float8,"
        " extract(epoch from clock_timestamp() - heartbeat_at)::float8"
        " from sessions where source = %s and pid = %s",
        (store.source, holder),
    ).fetchone()
    return ActiveFlusher(*row) if row else ActiveFlusher(f"session {holder}")


@dataclass(frozen=True, slots=True)
class FlusherStatus:
    """How the flusher is at one moment; ``str`` says it to a person.

    ``state`` is the one that it reports; else starting, if the active one is too young to have
    reported, silent, if the active one has stopped reporting, and down, if none is active. It is
    dropped if the source was given up. ``lag_bytes``: WAL above ``flushed_lsn``. ``report``: the
    last one (``flusher.progress.Report``), empty before the first, ``told_seconds_ago``.
    """

    state: str
    active: bool = False
    flushed_lsn: Lsn | None = None
    flushed_seconds_ago: float | None = None
    lag_bytes: int | None = None
    told_seconds_ago: float | None = None
    report: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        error = self.report.get("last_error")
        return self.sentence + (f"; last error: {error}" if error else "")

    @property
    def sentence(self) -> str:
        """``str`` without the last error, which may be over."""
        said, told = self.state, self.report
        if self.lag_bytes is not None:
            said += f", {self.lag_bytes / 1e6:,.1f} MB behind"
        if "flush_seconds_mean" in told:
            said += f", flushes take {told['flush_seconds_mean']:.3f} s"
            said += f", {counted(told['reconnects'], 'reconnect')}"
        return said

    @property
    def behind_seconds(self) -> float | None:
        """For how long the log, and with it a table without backlog, hasn't equalled the source.

        A log that catches up moves all the time, so the lag that its flusher reports counts, too.
        """
        age = self.flushed_seconds_ago
        if age is None or not self.active or self.state in ("starting", "silent"):
            return age
        return max(age, float(self.report.get("lag_seconds", 0.0)))

    def to_json(self) -> dict[str, Any]:
        return {
            **self.report,
            "active": self.active,
            "state": self.state,
            "flushed_lsn": str(self.flushed_lsn) if self.flushed_lsn is not None else None,
            "flushed_seconds_ago": self.flushed_seconds_ago,
            "lag_bytes": self.lag_bytes,
            "told_seconds_ago": self.told_seconds_ago,
        }


def flusher_status(store: LogStore, current: Lsn) -> FlusherStatus:
    """How the flusher is while the source's WAL ends at ``current``."""
    row = store.connection.execute(
        "select lsn::text, extract(epoch from now() - updated_at)::float8"
        " from flushed_lsn where source = %s",
        (store.source,),
    ).fetchone()
    flushed, flushed_age = (Lsn.parse(row[0]), row[1]) if row else (None, None)
    active = active_flusher(store)
    report, age = store.flusher_report() or ({}, None)
    is_fresh = age is not None and age < STALE_SECONDS
    return FlusherStatus(
        "dropped"
        if dropped_since(store) is not None
        else state_of(active, report.get("state") if is_fresh else None),
        active is not None,
        flushed,
        flushed_age,
        max(0, current - flushed) if flushed is not None else None,
        age,
        report,
    )


def state_of(active: ActiveFlusher | None, told: str | None) -> str:
    """The state of a flusher whose last report, if it is fresh, said ``told``."""
    if active is None:
        return told if told in _BETWEEN_SESSIONS else "down"
    # The report of a young session's predecessor is its end, or an old one.
    is_young = active.seconds is not None and active.seconds < STALE_SECONDS
    if is_young and told in (None, "stopped"):
        return "starting"
    return told or "silent"
