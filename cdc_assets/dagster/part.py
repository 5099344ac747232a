"""What a run of ours needs of the definitions: those of its own work, and of its own tables.

Dagster builds all definitions of a code location in the process of each run: a second of CPU for
500 tables. A run that a sensor or a schedule of ours asked for says by its tags what it is; any
other one, and every other process, has all of them (``build.process_defs``).

Whatever else is in the location may name any of our assets, and Dagster looks that up in every
process: so those that the run doesn't need are there by their keys alone.
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
from cdc_assets.dagster.assets.health import health_key
from cdc_assets.dagster.names import SOURCE_TAG, WORK_TAG, TableAssets, all_tables, job_name
from cdc_assets.errors import first_line

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Part:
    """``work`` is the tag of a run, None for one of another source, which needs nothing.

    ``others``: the assets of the source that aren't built.
    """

    work: str | None
    tables: Sequence[TableAssets]
    others: Sequence[dg.AssetSpec]


def part_for(config: SourceConfig) -> Part | None:
    """The part that the run of this process needs of a source; None: all of it."""
    run = this_run()
    source, work = (run.tags.get(tag, "") if run else "" for tag in (SOURCE_TAG, WORK_TAG))
    if run is None or not source or run.job_name != job_name(source, work):
        return None
    selected = {
        *(run.asset_selection or ()),
        *(check.asset_key for check in run.asset_check_selection or ()),
    }
    tables, others = all_tables(config), _all_specs(config)
    if source != config.name:
        return None if selected & others.keys() else Part(None, (), [*others.values()])
    wanted = [names for names in tables if not selected or selected & _concerned(names, work)]
    if selected - {key for names in wanted for key in _concerned(names, work)}:
        return None  # more than what a sensor asks for
    if work in _MADE:
        for names in wanted:
            others.pop(getattr(names, _MADE[work]))
    return Part(work, wanted, [*others.values()])


# The works that materialize assets, and which of a table.
_MADE = {"snapshot": "snapshot", "materialize": "lake", "maintain": "maintenance"}


def _concerned(names: TableAssets, work: str) -> set[dg.AssetKey]:
    """The assets of a table that work is done on, or that are checked."""
    return {getattr(names, _MADE[work])} if work in _MADE else {names.lake, names.source}


def _all_specs(config: SourceConfig) -> dict[dg.AssetKey, dg.AssetSpec]:
    keys = [health_key(config)]
    specs = {}
    for names in all_tables(config):
        keys += [names.source, names.staged_log, names.lake, names.maintenance]
        specs[names.snapshot] = dg.AssetSpec(names.snapshot, partitions_def=names.partitions)
    return specs | {key: dg.AssetSpec(key) for key in keys}


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
