"""What a run of ours needs of the definitions: those of its own work, and of its own tables.

Dagster builds all definitions of a code location in the process of each run: a second of CPU for
500 tables. A run that a sensor or a schedule of ours asked for says by its tags what it is; any
other one, and every other process, has all of them (``build.process_defs``).
"""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import dagster as dg
from dagster._grpc.types import ExecuteExternalJobArgs
from dagster._serdes import deserialize_value

from cdc_assets.config.source import SourceConfig
from cdc_assets.dagster.names import SOURCE_TAG, WORK_TAG, TableAssets, all_tables, job_name
from cdc_assets.errors import first_line

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Part:
    """``work`` is the tag of a run, None for one of another source, which needs nothing."""

    work: str | None
    tables: Sequence[TableAssets] = ()


def part_for(config: SourceConfig) -> Part | None:
    """The part that the run of this process needs of a source; None: all of it."""
    run = this_run()
    source, work = (run.tags.get(tag, "") if run else "" for tag in (SOURCE_TAG, WORK_TAG))
    if run is None or run.job_name != job_name(source, work):
        return None
    if source != config.name:
        return Part(None)
    checks = {key.asset_key for key in run.asset_check_selection or ()}
    wanted = {*(run.asset_selection or ()), *checks}
    tables = [
        names
        for names in all_tables(config)
        if not wanted or wanted & {names.source, names.snapshot, names.lake, names.maintenance}
    ]
    return Part(work, tables)


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
