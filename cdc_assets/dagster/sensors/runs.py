"""The runs that a sensor asked for: which are at work, and how the last ones ended.

A run that was killed together with its code server stays "started" in Dagster for ever, and a
sensor that waits for it would wait for ever. So every run of ours holds a session lock in Postgres
while it works; the lock goes with the process, and a started run without it is declared failed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import dagster as dg

from cdc_assets.dagster.names import FAILED_TAG, TableAssets, run_lock
from cdc_assets.log.store import LogStore

ACTIVE = (
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.MANAGED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
)
# Back-off after failures in a row: none after the first, as a tick's pace is one; then 6 s, 12 s, …
# 10 minutes. A run costs 5 s of CPU to launch.
FIRST_DELAY_SECONDS = 6.0
LONGEST_DELAY_SECONDS = 600.0
# A run has no lock while it imports its code and opens its session, some seconds on a busy machine,
# nor in the moment between its last step and its end.
PATIENCE_SECONDS = 60.0
# Runs of other tables lie between a table's failures: so many end within the longest delay.
_HISTORY = 40


@dataclass(frozen=True, slots=True)
class PastRun:
    """A finished run.

    ``assets`` are what it was asked for (None: everything), ``failed_tables`` the SQL names of what
    failed (None: all of it, if it failed).
    """

    succeeded: bool
    ended_at: datetime
    assets: frozenset[dg.AssetKey] | None = None
    failed_tables: frozenset[str] | None = None

    def concerns(self, names: TableAssets | None) -> bool:
        """Whether it says anything of a table's merges or copy (None: of the work as a whole)."""
        if names is None or self.assets is None:
            return True
        return not self.assets.isdisjoint((names.lake, names.snapshot))


# When a started run was first seen without its lock, by run id.
_missed_since: dict[str, float] = {}


def active_runs(
    instance: dg.DagsterInstance, store: LogStore, tags: Mapping[str, str]
) -> list[dg.DagsterRun]:
    """The runs with these tags that are queued or at work; those that are dead are ended here."""
    alive = []
    for run in instance.get_runs(dg.RunsFilter(tags=dict(tags), statuses=list(ACTIVE))):
        if run.status == dg.DagsterRunStatus.STARTED and not store.is_locked(run_lock(run.run_id)):
            now = time.monotonic()
            if now - _missed_since.setdefault(run.run_id, now) >= PATIENCE_SECONDS:
                _missed_since.pop(run.run_id)
                instance.report_run_failed(run, "The process of this run is gone.")
                continue
        else:
            _missed_since.pop(run.run_id, None)
        alive.append(run)
    return alive


def relief_is_due(
    instance: dg.DagsterInstance,
    runs: Sequence[dg.DagsterRun],
    after_seconds: Callable[[dg.DagsterRun], float],
) -> bool:
    """Whether each of ``runs`` has been at work for so long that the next one may be launched."""
    if not runs or any(run.status != dg.DagsterRunStatus.STARTED for run in runs):
        return not runs
    records = instance.get_run_records(dg.RunsFilter(run_ids=[run.run_id for run in runs]))
    now = time.time()
    return all(
        now - (record.start_time or now) >= after_seconds(record.dagster_run) for record in records
    )


def past_runs(instance: dg.DagsterInstance, tags: Mapping[str, str]) -> list[PastRun]:
    """The last finished runs with these tags, newest first; cancelled ones count as no failure."""
    finished = [
        dg.DagsterRunStatus.SUCCESS,
        dg.DagsterRunStatus.FAILURE,
        dg.DagsterRunStatus.CANCELED,
    ]
    records = instance.get_run_records(
        dg.RunsFilter(tags=dict(tags), statuses=finished), limit=_HISTORY
    )
    return [
        PastRun(
            record.dagster_run.status != dg.DagsterRunStatus.FAILURE,
            datetime.fromtimestamp(record.end_time, UTC)
            if record.end_time
            else record.update_timestamp,
            None
            if (selected := record.dagster_run.asset_selection) is None
            else frozenset(selected),
            _failed_tables(record.dagster_run.tags),
        )
        for record in records
    ]


def _failed_tables(tags: Mapping[str, str]) -> frozenset[str] | None:
    """None: all that the run was for."""
    named = json.loads(tags.get(FAILED_TAG, "null"))
    return None if named is None else frozenset(named)


def failures_in_a_row(past: Sequence[PastRun], table: str | None = None) -> int:
    """How often the newest runs failed without a success between; of ``table``, if one is given."""
    count = 0
    for run in past:
        blamed = run.failed_tables is None or table is None or table in run.failed_tables
        if run.succeeded or not blamed:
            break
        count += 1
    return count


def delay_seconds(failures: int) -> float:
    """How long to wait after so many failures in a row."""
    if failures <= 1:
        return 0.0
    return min(FIRST_DELAY_SECONDS * 2.0 ** (failures - 2), LONGEST_DELAY_SECONDS)


def wait_seconds(past: Sequence[PastRun], now: datetime, names: TableAssets | None = None) -> float:
    """Seconds left of the back-off, of a table if one is given; 0: the next attempt is due."""
    concerning = [run for run in past if run.concerns(names)]
    failures = failures_in_a_row(concerning, str(names.table) if names else None)
    if not failures:
        return 0.0
    return max(0.0, delay_seconds(failures) - (now - concerning[0].ended_at).total_seconds())


def is_awaited(run: dg.DagsterRun, wanting: Collection[dg.AssetKey]) -> bool:
    """Whether a table waits for the run's end: one that failed in it, or that it doesn't serve."""
    serves = run.asset_selection
    return FAILED_TAG in run.tags or (
        serves is not None and any(key not in serves for key in wanting)
    )
