"""The state of a source: its slot, its flusher, and every table. Read only.

One collection for the command line, the sensors and the checks, so that they can't disagree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from cdc_assets.lake.catalog.catalog import shown
from cdc_assets.log.locks import LockWait
from cdc_assets.log.relation import altered
from cdc_assets.log.sessions.workers import workers
from cdc_assets.log.store import LogStore
from cdc_assets.log.tables import GROUP
from cdc_assets.log.wishes import dropped_since, paused
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.session.waits import Wait, held_snapshots, waits
from cdc_assets.postgres.slots import current_position, slot_status

# States in which a flusher waits for its next session to begin, without the lock of its turn.
BETWEEN_SESSIONS = ("reconnecting", "stuck")
# A flusher that has the turn reports every few seconds.
SILENT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class TableStatus:
    """One table. Lags are of the lake against the source: bytes of WAL, and seconds.

    ``state`` is new (not registered yet), waiting, copying, streaming, copied or parked.
    """

    name: str
    lake_table: str
    state: str
    reason: str | None
    epoch: int
    snapshot_lsn: str | None
    applied_lsn: str | None
    lag_bytes: int | None
    lag_seconds: float | None
    pending_rows: int
    chunks_done: int
    chunks_total: int
    rows_copied: int
    copy_rows_per_second: float | None = None
    """Of a copy under way: the rate of all workers together in the last minute."""
    copy_seconds_left: float | None = None
    altered: bool = False
    """The source's columns differ from the lake's: a schema change waits."""
    worker: str | None = None
    """The process that merges it."""
    paused_since: str | None = None
    """Since when it, or its source, is paused: nothing is applied."""
    applied_offset: int = 0
    """The first offset of its log that isn't applied."""
    copy_idle_seconds: float | None = None
    """Of a copy under way: for how many seconds nothing of it was written."""
    info: tuple[str, ...] = ()
    """What the lake table lacks on purpose."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker that merges. ``tables`` are those that it has claimed now, with their epochs."""

    worker: str
    process: str
    started_at: datetime
    heard_seconds_ago: float | None
    alive: bool
    tables: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class PinStatus:
    """A session that holds a snapshot for copies, and thereby holds back the source's vacuum.

    ``xmin_age``: in transactions. ``tables``: those that are copied under it.
    """

    tables: tuple[str, ...]
    seconds: float
    xmin_age: int


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """A source with its slot (None before the first start) and its tables."""

    source: str
    tables: tuple[TableStatus, ...]
    slot: Mapping[str, Any]
    flusher: Mapping[str, Any]
    lake: Mapping[str, Any]
    workers: tuple[WorkerStatus, ...] = ()
    waits: tuple[Wait, ...] = ()
    """Our sessions at the source that wait for somebody's lock."""
    pins: tuple[PinStatus, ...] = ()
    lock_waits: tuple[LockWait, ...] = ()
    """Our sessions that wait for a lock of ours."""

    def to_json(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "tables": [asdict(table) for table in self.tables],
            "slot": dict(self.slot),
            "flusher": dict(self.flusher),
            "lake": dict(self.lake),
            "workers": [
                {**asdict(worker), "started_at": worker.started_at.isoformat()}
                for worker in self.workers
            ],
            "waits": [asdict(wait) for wait in self.waits],
            "pins": [asdict(pin) for pin in self.pins],
            "lock_waits": [asdict(wait) for wait in self.lock_waits],
        }


_TABLES = """
select t.table_name, t.state, t.reason, t.epoch, t.snapshot_lsn::text, m.applied_lsn::text,
       coalesce(b.rows, 0), b.oldest,
       coalesce(p.done, 0), coalesce(p.total, 0), coalesce(p.rows, 0),
       p.rows_a_second::float8, p.chunks_a_second::float8, t.complete_lsn::text,
       coalesce(m."offset", 0),
       extract(epoch from clock_timestamp() - p.written_at)::float8,
       extract(epoch from clock_timestamp() - i.created_at)::float8,
       t.inserts_only, t.left_out
  from tables t
  left join pins i on i.pin = t.pin
  left join mat_cursor m on m.consumer_group = %(group)s and m.source = t.source
                        and m.table_name = t.table_name
  left join lateral (
       select sum(l.row_count)::bigint as rows, min(l.commit_time) as oldest from log_index l
        where l.source = t.source and l.table_name = t.table_name
          and l.end_offset > coalesce(m."offset", 0)
          and (t.snapshot_lsn is null or l.flushable_lsn > t.snapshot_lsn)) b on true
  left join lateral (
       select count(*) filter (where c.state = 'landed') as done, count(*) as total,
              sum(c.rows) filter (where c.state = 'landed')::bigint as rows,
              max(c.heartbeat_at) filter (where c.state in ('written', 'landed')) as written_at,
              sum(c.rows) filter (where w.recent) / greatest(1, extract(epoch from
                clock_timestamp() - min(c.heartbeat_at
                  - make_interval(secs => c.seconds)) filter (where w.recent))) as rows_a_second,
              count(*) filter (where w.recent) / greatest(1, extract(epoch from
                clock_timestamp() - min(c.heartbeat_at
                  - make_interval(secs => c.seconds)) filter (where w.recent))) as chunks_a_second
         from snapshot_progress c, lateral (
              select c.state in ('written', 'landed') and c.rows is not null
                     and c.heartbeat_at > clock_timestamp() - interval '1 minute' as recent) w
        where c.source = t.source and c.table_name = t.table_name and c.epoch = t.epoch) p on true
 where t.source = %(source)s
"""


def collect(pipeline: Pipeline) -> SourceStatus:
    """Ask both databases. Raises psycopg.OperationalError when one can't be reached."""
    config, store = pipeline.config, pipeline.store
    with pipeline.connect_source("status") as source:
        slot = slot_status(source, config.slot)
        differing = altered(source, store.tables(), config.publication)
        current = current_position(source)
        waiting = waits(source, config.name, config.slot)
        held = held_snapshots(source, config.name)
    flushed_row = store.connection.execute(
        "select lsn::text, extract(epoch from now() - updated_at)::float8, commit_time"
        " from flushed_lsn where source = %s",
        (config.name,),
    ).fetchone()
    flushed = Lsn.parse(flushed_row[0]) if flushed_row else None
    flushed_age = float(flushed_row[1]) if flushed_row else None
    flusher = _flusher(store, flushed, flushed_age, current)
    behind = _behind(flusher, flushed_age)
    now = store.server_now()
    rows = store.connection.execute(_TABLES, {"group": GROUP, "source": config.name}).fetchall()
    known = {found[0]: found for found in rows}
    written = min((found[15] for found in rows if found[15] is not None), default=None)
    merging = [
        WorkerStatus(
            str(found.worker),
            found.process,
            found.started_at,
            found.heard_seconds_ago,
            found.alive,
            {str(table): epoch for table, epoch in sorted(found.claims.items())},
        )
        for found in workers(store)
    ]
    under_pins = _copied_under(store)
    by_table = {name: worker.process for worker in merging for name in worker.tables}
    resting = paused(store)
    tables = []
    for table in config.tables:
        lake = f"{config.namespace}.{config.lake_name(table.id)}"
        found = known.get(table.name)
        if found is None:
            tables.append(
                TableStatus(table.name, lake, "new", None, 0, None, None, None, None, 0, 0, 0, 0)
            )
            continue
        (_, state, reason, epoch, snapshot, applied, pending, oldest, done, total, copied) = found[
            :11
        ]
        rate, chunk_rate = found[11:13] if state == "copying" else (None, None)
        position = _applied(state, snapshot, applied, pending, flushed)
        if position is not None and found[13] is not None and position < Lsn.parse(found[13]):
            position = None  # resumed under a second snapshot: not whole before that point
        tables.append(
            TableStatus(
                table.name,
                lake,
                state,
                reason,
                epoch,
                snapshot,
                str(position) if position else None,
                max(0, current - position) if position else None,
                _seconds(state, position, current, pending, oldest, now, behind),
                int(pending),
                int(done),
                int(total),
                int(copied),
                rate,
                (total - done) / chunk_rate if chunk_rate else None,
                table.id in differing,
                by_table.get(table.name),
                str(resting[table.id]) if table.id in resting else None,
                int(found[14]),
                _idle(found[15], found[16], written) if state == "copying" else None,
                _info(inserts_only=found[17], left_out=found[18]),
            )
        )
    return SourceStatus(
        config.name,
        tuple(tables),
        {
            "name": config.slot,
            "exists": slot is not None,
            "active": slot is not None and slot.active_pid is not None,
            "confirmed_flush_lsn": str(slot.confirmed_flush) if slot else None,
            "retained_bytes": slot.retained_bytes if slot else 0,
            "wal_status": slot.wal_status if slot else None,
        },
        flusher,
        {"catalog": shown(config)},
        tuple(merging),
        waiting,
        tuple(
            PinStatus(under_pins.get(snapshot.backend_pid, ()), snapshot.seconds, snapshot.xmin_age)
            for snapshot in held
        ),
        store.lock_waits(),
    )


def _copied_under(store: LogStore) -> dict[int, tuple[str, ...]]:
    """Which tables are copied under the snapshots that sessions of the source hold, by backend."""
    rows = store.connection.execute(
        "select h.backend_pid, array_agg(t.table_name order by t.table_name)"
        " from pin_holders h join tables t on t.pin = h.pin and t.state = 'copying'"
        " where t.source = %s group by 1",
        (store.source,),
    ).fetchall()
    return {int(pid): tuple(names) for pid, names in rows}


def _flusher(
    store: LogStore, flushed: Lsn | None, flushed_age: float | None, current: Lsn
) -> dict[str, Any]:
    """The flusher as the log shows it, with its own last report.

    ``state`` is down when none is active, silent when the active one has stopped reporting, and
    dropped when the source was given up.
    """
    active = store.is_locked(f"flusher:{store.source}")
    told, age = store.flusher_report() or ({}, None)
    state = told.get("state") if age is not None and age < SILENT_SECONDS else None
    if not active and state not in BETWEEN_SESSIONS:
        state = None
    if dropped_since(store) is not None:
        state = "dropped"
    return {
        **told,
        "active": active,
        "state": state or ("silent" if active else "down"),
        "flushed_lsn": str(flushed) if flushed else None,
        "flushed_seconds_ago": flushed_age,
        "lag_bytes": max(0, current - flushed) if flushed else None,
        "told_seconds_ago": age,
    }


def _idle(own: float | None, pinned: float | None, any_written: float | None) -> float | None:
    """For how many seconds a copy wrote nothing; before its first chunk others' chunks count."""
    since = (any_written if own is None else own, pinned)
    return min((seconds for seconds in since if seconds is not None), default=None)


def _behind(flusher: Mapping[str, Any], flushed_age: float | None) -> float | None:
    """For how long the log, and with it a table without a backlog, hasn't equalled the source.

    A log that catches up moves all the time, so the lag that its flusher reports counts, too.
    """
    if flushed_age is None or not flusher["active"] or flusher["state"] == "silent":
        return flushed_age
    return max(flushed_age, float(flusher.get("lag_seconds", 0.0)))


def _info(*, inserts_only: bool, left_out: Sequence[str]) -> tuple[str, ...]:
    said = []
    if inserts_only:
        said.append("Postgres can't identify changed rows: inserts and truncates alone")
    if left_out:
        said.append(f"Postgres doesn't send its generated columns: {', '.join(left_out)}")
    return tuple(said)


def _applied(
    state: str, snapshot: str | None, applied: str | None, pending: int, flushed: Lsn | None
) -> Lsn | None:
    """Up to which LSN the lake table shows the source; None before its copy is complete."""
    if state != "streaming" or snapshot is None:
        return None
    reached = max(Lsn.parse(snapshot), Lsn.parse(applied) if applied else Lsn.ZERO)
    return max(reached, flushed) if flushed is not None and not pending else reached


def _seconds(
    state: str,
    position: Lsn | None,
    current: Lsn,
    pending: int,
    oldest: datetime | None,
    now: datetime,
    behind: float | None,
) -> float | None:
    """How long ago the lake table last equalled the source."""
    if state != "streaming" or position is None:
        return None
    if pending and oldest is not None:
        return max(0.0, (now - oldest).total_seconds())
    return 0.0 if position >= current else behind
