"""The state of a source: its slot, its flusher, and every table. Read only.

One collection for the command line, the sensors and the checks, so that they can't disagree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from cdc_assets.config.source import SourceConfig
from cdc_assets.config.tables import TableConfig
from cdc_assets.lake.catalog.catalog import shown
from cdc_assets.log.asked.wishes import paused
from cdc_assets.log.backfills import Backfill, backfills, looked_for_deletes
from cdc_assets.log.groups.standing import GroupStatus, groups
from cdc_assets.log.locks import LockWait
from cdc_assets.log.relation import altered
from cdc_assets.log.sessions.flusher_status import FlusherStatus, flusher_status
from cdc_assets.log.sessions.workers import KnownWorker, workers
from cdc_assets.log.store import LogStore
from cdc_assets.observe.figures.replay import ReplayStatus, replay_status
from cdc_assets.observe.figures.rows import table_rows
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.session.waits import Wait, held_snapshots, waits
from cdc_assets.postgres.slots import SlotStatus, current_position, slot_status
from cdc_assets.readiness.source.left import still_followed


@dataclass(frozen=True, slots=True)
class TableStatus:
    """One table. Lags are of the lake against the source: bytes of WAL, and seconds.

    ``state`` is new (not registered yet), waiting, copying, streaming, copied or parked.
    """

    name: str
    lake_table: str
    state: str
    reason: str | None = None
    epoch: int = 0
    snapshot_lsn: str | None = None
    applied_lsn: str | None = None
    lag_bytes: int | None = None
    lag_seconds: float | None = None
    pending_rows: int = 0
    chunks_done: int = 0
    chunks_total: int = 0
    rows_copied: int = 0
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
    """What the lake table lacks on purpose, and until when nothing is merged on purpose."""
    problem: str | None = None
    """Why its log couldn't be applied when a follower last tried, and for how long that lasts."""
    problem_seconds: float | None = None


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
    slot_name: str
    slot: SlotStatus | None
    flusher: FlusherStatus
    lake: Mapping[str, Any]
    workers: tuple[KnownWorker, ...] = ()
    waits: tuple[Wait, ...] = ()
    """Our sessions at the source that wait for somebody's lock."""
    pins: tuple[PinStatus, ...] = ()
    lock_waits: tuple[LockWait, ...] = ()
    """Our sessions that wait for a lock of ours."""
    left: tuple[str, ...] = ()
    """Tables that are out of the configuration, and whose changes are staged still."""
    dropped: tuple[str, ...] = ()
    """Tables that are out of the configuration, and that the source hasn't any more."""
    backfills: tuple[Backfill, ...] = ()
    """Those that haven't ended."""
    standby: ReplayStatus | None = None
    """How far a source that is a hot standby is."""
    groups: tuple[GroupStatus, ...] = ()
    """The consumer groups beside the lake's."""
    log_of: str | None = None
    """Of a second lake: the source whose log it gets."""

    @property
    def retained_bytes(self) -> int:
        """The WAL that the slot keeps at the source."""
        return self.slot.retained_bytes if self.slot is not None else 0

    def to_json(self) -> dict[str, Any]:
        slot = self.slot
        return {
            "source": self.source,
            "tables": [asdict(table) for table in self.tables],
            "slot": {
                "name": self.slot_name,
                "exists": slot is not None,
                "active": slot is not None and slot.active_pid is not None,
                "confirmed_flush_lsn": str(slot.confirmed_flush) if slot else None,
                "retained_bytes": self.retained_bytes,
                "wal_status": slot.wal_status if slot else None,
            },
            "flusher": self.flusher.to_json(),
            "lake": dict(self.lake),
            "workers": [
                {
                    "worker": str(known.worker),
                    "process": known.process,
                    "started_at": known.started_at.isoformat(),
                    "heard_seconds_ago": known.heard_seconds_ago,
                    "alive": known.alive,
                    "tables": {str(table): epoch for table, epoch in sorted(known.claims.items())},
                }
                for known in self.workers
            ],
            "waits": [asdict(wait) for wait in self.waits],
            "pins": [asdict(pin) for pin in self.pins],
            "lock_waits": [asdict(wait) for wait in self.lock_waits],
            "left": list(self.left),
            "dropped": list(self.dropped),
            "backfills": [backfill.to_json() for backfill in self.backfills],
            "standby": asdict(self.standby) if self.standby is not None else None,
            "groups": [group.to_json() for group in self.groups],
            "log_of": self.log_of,
        }


def _quiet(table: TableConfig, now: datetime) -> list[str]:
    if not (left := table.freshness.quiet_seconds(now)):
        return []
    end = (now + timedelta(seconds=left)).astimezone(UTC)
    return [f"quiet until {end:%Y-%m-%d %H:%M} UTC: nothing is merged by itself"]


def _deletes(config: SourceConfig, begun: datetime | None) -> list[str]:
    """As of when deleted rows are gone, where no query of changes shows them."""
    if config.query is None:
        return []
    if begun is None:
        return ["rows that were deleted at the source since the copy are still here"]
    at = f"{begun.astimezone(UTC):%Y-%m-%d %H:%M:%S}"
    return [f"rows that were deleted at the source are gone as of {at} UTC"]


def collect(pipeline: Pipeline) -> SourceStatus:
    """Ask both databases. Raises psycopg.OperationalError when one can't be reached."""
    config, store = pipeline.config, pipeline.store
    with pipeline.looks.use() as source:
        slot = slot_status(source, config.slot)
        registered = store.tables()
        differing = altered(source, registered, config.publication)
        current = current_position(source)
        waiting = waits(source, config.name, config.slot)
        held = held_snapshots(source, config.name)
        left = still_followed(source, config, registered)
        standby = replay_status(source) if config.postgres.standby else None
    flusher = flusher_status(store, current)
    known = {row.name: row for row in table_rows(store)}
    merging = tuple(workers(store))
    by_table = {table: worker.process for worker in merging for table in worker.claims}
    resting, now = paused(store), store.server_now()
    looked = looked_for_deletes(store) if config.query is not None else {}
    tables = []
    for table in config.tables:
        lake = ".".join(config.lake_identifier(table.id))
        row = known.get(table.name)
        if row is None:
            tables.append(TableStatus(table.name, lake, "new"))
            continue
        position = row.position(flusher.flushed_lsn)
        tables.append(
            TableStatus(
                row.name,
                lake,
                row.state,
                row.reason,
                row.epoch,
                row.snapshot_lsn,
                str(position) if position else None,
                max(0, current - position) if position else None,
                row.lag_seconds(position, current, flusher.behind_seconds),
                row.pending_rows,
                row.chunks_done,
                row.chunks_total,
                row.rows_copied,
                row.copy_rows_per_second,
                row.copy_seconds_left,
                table.id in differing,
                by_table.get(table.id),
                str(resting[table.id]) if table.id in resting else None,
                row.applied_offset,
                row.copy_idle_seconds,
                (*row.info, *_quiet(table, now), *_deletes(config, looked.get(table.id))),
                row.present_problem(altered=table.id in differing),
                row.problem_seconds,
            )
        )
    under_pins = _copied_under(store)
    return SourceStatus(
        config.name,
        tuple(tables),
        config.slot,
        slot,
        flusher,
        {"catalog": shown(config)},
        merging,
        waiting,
        tuple(
            PinStatus(under_pins.get(snapshot.backend_pid, ()), snapshot.seconds, snapshot.xmin_age)
            for snapshot in held
        ),
        store.lock_waits(),
        *left,
        tuple(backfills(store, ended=False)),
        standby,
        groups(store),
        config.log.of if config.log is not None else None,
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
