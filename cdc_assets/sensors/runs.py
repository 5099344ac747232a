"""The runs that a sensor asked for: which are active, and how the last ones ended."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import dagster as dg

from cdc_assets.assets.names import FAILED_TAG

ACTIVE = (
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.MANAGED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
)
# Back-off after failures in a row: 10 s, 20 s, … 10 minutes. A run costs 5 s of CPU to launch.
FIRST_DELAY_SECONDS = 10.0
LONGEST_DELAY_SECONDS = 600.0
# The delay is at its longest after seven failures; older runs change nothing.
_HISTORY = 8


@dataclass(frozen=True, slots=True)
class PastRun:
    """A finished run; ``failed_tables`` is None where the run failed as a whole."""

    succeeded: bool
    ended_at: datetime
    failed_tables: frozenset[str] | None


def active_runs(instance: dg.DagsterInstance, tags: Mapping[str, str]) -> list[dg.DagsterRun]:
    """The runs with these tags that are queued or at work."""
    return list(instance.get_runs(dg.RunsFilter(tags=dict(tags), statuses=list(ACTIVE))))


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
            _failed_tables(record.dagster_run.tags),
        )
        for record in records
    ]


def _failed_tables(tags: Mapping[str, str]) -> frozenset[str] | None:
    return frozenset(json.loads(tags[FAILED_TAG])) if FAILED_TAG in tags else None


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
    if failures <= 0:
        return 0.0
    return min(FIRST_DELAY_SECONDS * 2.0 ** (failures - 1), LONGEST_DELAY_SECONDS)


def wait_seconds(past: Sequence[PastRun], now: datetime, table: str | None = None) -> float:
    """What is left of the back-off; 0 when the next attempt is due."""
    failures = failures_in_a_row(past, table)
    if not failures:
        return 0.0
    return max(0.0, delay_seconds(failures) - (now - past[0].ended_at).total_seconds())
