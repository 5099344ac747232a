"""The sensor that has the checks run: soon after a table begins to stream, then now and then.

With many tables a run takes long, so none begins while tables are copied, and the longer the last
one took, the longer is the pause. What each check reads and writes down costs the same whether its
table changed or not, so a run checks those that did.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import dagster as dg

from cdc_assets.config.source import SourceConfig
from cdc_assets.dagster.checks import lag, ready, unique_key, values
from cdc_assets.dagster.internals import AssetCheckExecutionRecordStatus
from cdc_assets.dagster.names import (
    TableAssets,
    all_tables,
    job_name,
    of_source,
    run_tags,
)
from cdc_assets.dagster.sensors.pace import reachable, skipped
from cdc_assets.dagster.sensors.runs import active_runs
from cdc_assets.dagster.sensors.services import spark_address
from cdc_assets.dagster.sensors.sessions import LOOK_SECONDS, keep_instance, session, status_of
from cdc_assets.log.states import TableState
from cdc_assets.log.verified import keys_unfinished
from cdc_assets.observe.status import TableStatus

# What is due stays due for minutes, and a tick takes 50 ms of CPU.
TICK_SECONDS = 28
EVERY_SECONDS = 600.0
# Of a table that nothing changes; and the time that is left then until alerts tell of it.
AGAIN_SECONDS, SPARE_SECONDS = 22 * 3_600.0, 2 * 3_600.0
# The checks of a lake table; the source table has another one.
_OF_LAKE = (lag.NAME, unique_key.NAME, values.NAME)
# Tables with checks.
CHECKED = (TableState.STREAMING, TableState.PARKED)
# So that checking takes 5 % of the time at most.
PAUSE_FACTOR = 20.0
LONGEST_PAUSE_SECONDS = 3_600.0
# Of a run: which of this code server's requests it is of.
ASKED_TAG = "cdc_assets/asked"


def wait_seconds(
    last: tuple[float, float] | None, now: float, *, unchecked: Sequence[str]
) -> float:
    """Seconds left until the next run, given the last one's start and end (epoch seconds)."""
    if last is None:
        return 0.0
    began, ended = last
    pause = min(PAUSE_FACTOR * (ended - began), LONGEST_PAUSE_SECONDS)
    # A table that has never been checked doesn't wait for the others' turn.
    due = ended + (pause if unchecked else max(EVERY_SECONDS, pause))
    return max(0.0, due - now)


@dataclass(frozen=True, slots=True)
class Look:
    """What a table's checks depend on: while it stays, they would find the same again."""

    state: str
    epoch: int
    applied_offset: int
    waits: bool
    """Changes of it wait, or files whose keys weren't looked at."""
    late: bool

    @classmethod
    def of(cls, status: TableStatus, names: TableAssets, *, unfinished: bool) -> Look:
        warn = names.config.table(names.table).freshness.warn.total_seconds()
        return cls(
            status.state,
            status.epoch,
            status.applied_offset,
            unfinished or status.pending_rows > 0,
            (status.lag_seconds or 0.0) > warn,
        )


class Memory:
    """What this code server has had checked of one source. A new one has all checked once."""

    def __init__(self) -> None:
        self._asked = dict[dg.AssetKey, Look]()
        self._asked_at, self._token = 0.0, ""
        self._done = dict[dg.AssetKey, tuple[Look, float]]()
        self._failed = frozenset[dg.AssetKey]()
        self.has_ticked = False
        self.was_ready = False
        """Whether every source table is known to have been looked at before its copy."""

    def ask(self, looks: Mapping[dg.AssetKey, Look], now: float) -> dict[str, str]:
        """The tags of a run that is asked for to check these; ``now`` in epoch seconds."""
        self._asked, self._asked_at, self._token = dict(looks), now, uuid.uuid4().hex
        return {ASKED_TAG: self._token}

    @property
    def asks(self) -> bool:
        """Whether the outcome of a run that was asked for isn't known yet."""
        return bool(self._asked)

    def settle(
        self, last: dg.RunRecord | None, failed: Callable[[Iterable[dg.AssetKey]], set[dg.AssetKey]]
    ) -> None:
        """Remember what the run that was asked for checked, if ``last`` is it and succeeded."""
        run = last.dagster_run if last is not None else None
        # One that a person executed again has its tags, and perhaps a part of its checks.
        ours = run is not None and run.parent_run_id is None
        if run is not None and ours and run.tags.get(ASKED_TAG) == self._token and run.is_success:
            self._done |= {key: (look, self._asked_at) for key, look in self._asked.items()}
            self._failed = self._failed - set(self._asked) | failed(self._asked)
        self._asked = {}

    def knows(self, key: dg.AssetKey) -> bool:
        return key in self._done

    def is_due(self, key: dg.AssetKey, look: Look, now: float, again_seconds: float) -> bool:
        """Whether a table changed since it was checked, or failed, or wasn't checked for long."""
        return not self.rests(key, look) or self.is_old(key, now, again_seconds)

    def rests(self, key: dg.AssetKey, look: Look) -> bool:
        """Whether a table was checked, passed, and didn't change since."""
        before, _ = self._done.get(key, (None, 0.0))
        return before == look and not look.waits and key not in self._failed

    def is_old(self, key: dg.AssetKey, now: float, again_seconds: float) -> bool:
        """Whether a table that was checked is to be checked again, whatever happened to it."""
        return key in self._done and not 0 <= now - self._done[key][1] < again_seconds

    def checks_of(self, names: TableAssets, look: Look) -> list[dg.AssetCheckKey]:
        """The checks of a table that is due: of one that rests, not the one that is its look."""
        rests = self.rests(names.lake, look)
        mine = [name for name in _OF_LAKE if not (rests and name == lag.NAME)]
        lake = [dg.AssetCheckKey(names.lake, name) for name in mine]
        return [*lake, dg.AssetCheckKey(names.source, ready.NAME)]


# By configuration: under another one all is checked once more.
_memories: dict[str, Memory] = {}


def again_seconds(config: SourceConfig) -> float:
    """How old the checks of a table become that nothing changes; before alerts tell of them."""
    told = config.verify.fail_after.total_seconds()
    return min(AGAIN_SECONDS, max(0.75 * told, told - SPARE_SECONDS))


def checks_sensor(
    config: SourceConfig, job: dg.UnresolvedAssetJobDefinition
) -> dg.SensorDefinition:
    """``checks_<source>``."""
    tables = all_tables(config)
    tags, first_tags = run_tags(config, "check"), run_tags(config, "ready")

    @dg.sensor(
        **of_source(config, "checks"),
        job=job,
        minimum_interval_seconds=TICK_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Has the checks run: of the source first, of a table after its copy, then of"
        " those that changed every ten minutes, and of the others after 22 hours.",
    )
    @skipped
    def tick(context: dg.SensorEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        keep_instance(context)
        instance, memory = context.instance, _memories.setdefault(config.dump(), Memory())
        with reachable(config), session(config, "checks sensor") as pipeline:
            active = bool(active_runs(instance, pipeline.store, tags))
            asking = bool(active_runs(instance, pipeline.store, first_tags))
            if not asking and not memory.was_ready and (asked := _never_asked(instance, tables)):
                # A run takes seconds of CPU; at a first start the flusher has the processors.
                if not memory.has_ticked and pipeline.store.flushed_lsn() is None:
                    memory.has_ticked = True
                    return dg.SkipReason("Waiting for the flusher's look at the source.")
                return dg.RunRequest(asset_selection=[], asset_check_keys=asked, tags=first_tags)
            memory.was_ready = not asking
            states = {row.table: row.state for row in pipeline.store.tables()}
            if not set(states.values()) & {*CHECKED}:
                return dg.SkipReason("No table is copied yet.")
            if active:
                return dg.SkipReason("A run is at it.")
            if spark_address(config) is None:
                return dg.SkipReason("Waiting for Spark to start.")
            past = instance.get_run_records(dg.RunsFilter(tags=tags), limit=1)
            last = past[0] if past else None
            now = time.time()
            if memory.asks:
                memory.settle(last, lambda keys: _failed(instance, keys))
            statuses = {
                status.name: status
                for status in status_of(pipeline, "checks", within_seconds=LOOK_SECONDS).tables
            }
            unfinished = keys_unfinished(pipeline.store)
        looks = [
            (
                names,
                Look.of(statuses[str(names.table)], names, unfinished=names.table in unfinished),
            )
            for names in tables
        ]
        copying = TableState.COPYING in states.values()
        due = due_tables(memory, looks, now, again_seconds(config), copying=copying)
        if not due and copying:
            return dg.SkipReason("Tables are being copied; checks come after that.")
        if not due:
            return dg.SkipReason("Nothing has changed since the last checks.")
        left = wait_seconds(
            times(last),
            now,
            unchecked=_unchecked(
                instance, [names for names, _ in due if not memory.knows(names.lake)]
            ),
        )
        if left > 0:
            return dg.SkipReason(f"The next checks, of {len(due)} tables, are due in {left:.0f} s.")
        keys = [key for names, look in due for key in memory.checks_of(names, look)]
        mark = memory.ask({names.lake: look for names, look in due}, now)
        return dg.RunRequest(asset_selection=[], asset_check_keys=keys, tags={**tags, **mark})

    return tick


def due_tables(
    memory: Memory,
    looks: Sequence[tuple[TableAssets, Look]],
    now: float,
    again_seconds: float,
    *,
    copying: bool,
) -> list[tuple[TableAssets, Look]]:
    """Those whose checks are due; while tables are copied only those checked too long ago.

    A parked table's checks say that it is parked.
    """
    return [
        (names, look)
        for names, look in looks
        if look.state in CHECKED
        and (
            memory.is_old(names.lake, now, again_seconds)
            if copying
            else memory.is_due(names.lake, look, now, again_seconds)
        )
    ]


def times(last: dg.RunRecord | None) -> tuple[float, float] | None:
    """A run's start and end; one that never started took no time."""
    if last is None:
        return None
    ended = last.end_time or 0.0
    return last.start_time or ended, ended


def _unchecked(instance: dg.DagsterInstance, tables: Sequence[TableAssets]) -> list[str]:
    """Those of ``tables`` that were never checked."""
    keys = [dg.AssetCheckKey(names.lake, unique_key.NAME) for names in tables]
    known = instance.event_log_storage.get_latest_asset_check_execution_by_key(keys) if keys else ()
    return [key.asset_key.to_user_string() for key in keys if key not in known]


def _failed(instance: dg.DagsterInstance, lake: Iterable[dg.AssetKey]) -> set[dg.AssetKey]:
    """The lake tables with a check that didn't pass at last."""
    keys = [dg.AssetCheckKey(key, name) for key in lake for name in _OF_LAKE]
    known = instance.event_log_storage.get_latest_asset_check_execution_by_key(keys)
    return {
        key.asset_key
        for key, record in known.items()
        if record.status != AssetCheckExecutionRecordStatus.SUCCEEDED
    }


def _never_asked(
    instance: dg.DagsterInstance, tables: Sequence[TableAssets]
) -> list[dg.AssetCheckKey]:
    """The checks ``ready``, or none if each was evaluated before: they come before a copy."""
    keys = [dg.AssetCheckKey(names.source, ready.NAME) for names in tables]
    known = instance.event_log_storage.get_latest_asset_check_execution_by_key(keys)
    return [] if all(key in known for key in keys) else keys


def checks_job(
    config: SourceConfig, checks: Sequence[dg.AssetChecksDefinition]
) -> dg.UnresolvedAssetJobDefinition:
    """The job that runs ``checks``, those of every table."""
    return dg.define_asset_job(
        job_name(config.name, "check"),
        selection=dg.AssetSelection.checks(*checks),
        description=f"The checks of the source {config.name} and of its lake tables.",
        executor_def=dg.in_process_executor,
    )
