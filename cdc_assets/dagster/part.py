"""What a run of ours needs of the definitions: those of its own work, and of its own tables.

Dagster builds all definitions of a code location in the process of each run: a second of CPU for
500 tables. A run that a sensor or a schedule of ours asked for says by its tags what it is; any
other one, and every other process, has all of them (``build.process_defs``).

Somebody else's sensors, schedules and assets may name ours, and Dagster looks those up in every
process; and a project's own module may look up anything as it is loaded. So a run is only told that
it may do with a part in a location of sources alone (``sensors.location``), whose module says so
(:func:`serves_sources_alone`).
"""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import dagster as dg

from cdc_assets.config.source import SourceConfig
from cdc_assets.dagster.internals import ExecuteExternalJobArgs, deserialize_value
from cdc_assets.dagster.names import SOURCE_TAG, WORK_TAG, TableAssets, all_tables, job_name
from cdc_assets.errors import first_line

_log = logging.getLogger(__name__)

# Of a run that may do with a part.
PART_TAG = "cdc_assets/part"
# The works that materialize assets, and which of a table.
_MADE = {"snapshot": "snapshot", "materialize": "lake", "maintain": "maintenance"}


_alone: list[bool] = []


def serves_sources_alone() -> None:
    """Say that this process serves definitions that nobody looks anything up in but Dagster."""
    _alone.append(True)


def is_told_to_serve_alone() -> bool:
    """Whether :func:`serves_sources_alone` was said in this process."""
    return bool(_alone)


@dataclass(frozen=True, slots=True)
class Part:
    """``work`` is the tag of a run, None for one of another source, which needs nothing."""

    work: str | None
    tables: Sequence[TableAssets] = ()


def part_for(config: SourceConfig) -> Part | None:
    """The part that the run of this process needs of a source; None: all of it."""
    run = this_run()
    source, work = (run.tags.get(tag, "") if run else "" for tag in (SOURCE_TAG, WORK_TAG))
    asked = run is not None and PART_TAG in run.tags and source
    if run is None or not asked or run.job_name != job_name(source, work):
        return None
    selected = {
        *(run.asset_selection or ()),
        *(check.asset_key for check in run.asset_check_selection or ()),
    }
    tables = all_tables(config)
    if source != config.name:
        theirs = {key for names in tables for key in names.keys}
        return None if selected & theirs else Part(None)
    wanted = [names for names in tables if not selected or selected & _concerned(names, work)]
    if selected - {key for names in wanted for key in _concerned(names, work)}:
        return None  # more than what a sensor asks for
    return Part(work, wanted)


def _concerned(names: TableAssets, work: str) -> set[dg.AssetKey]:
    """The assets of a table that work is done on, or that are checked."""
    return {getattr(names, _MADE[work])} if work in _MADE else {names.lake, names.source}


@cache
def this_run() -> dg.DagsterRun | None:
    """The run that a code server started this process for; None in any other process."""
    # No public way in; where Dagster starts runs otherwise, they have all definitions.
    given = vars(multiprocessing.current_process()).get("_args") or ()
    try:
        for text in given:
            if isinstance(text, str):
                asked = deserialize_value(text, ExecuteExternalJobArgs)
                assert asked.instance_ref is not None
                with dg.DagsterInstance.from_ref(asked.instance_ref) as instance:
                    return instance.get_run_by_id(asked.run_id)
    except Exception as error:  # noqa: BLE001 - then it has all of them
        _log.info("this process may be a run's: %s", first_line(error))
    return None
