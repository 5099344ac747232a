"""What the code location that they are in means for the runs that our sensors ask for.

A run may do with a part of the definitions where nobody else's sensors are; and it needs no process
but its own where nobody chose an executor.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, TypeVar, cast

import dagster as dg

from cdc_assets.dagster.internals import CONTEXT_REPOSITORY
from cdc_assets.dagster.names import SOURCE_TAG, all_tables, health_key, marks_key
from cdc_assets.dagster.part import PART_TAG, is_told_to_serve_alone
from cdc_assets.dagster.resources.sources import sources

R = TypeVar("R")
# Of the executor that Dagster takes where none is given.
_IN_PROCESS: Final[dict[str, Any]] = {"execution": {"config": {"in_process": {}}}}


def told(arguments: Sequence[Any], result: R) -> R:
    """What a tick with these ``arguments`` returns; its runs are told if they may build a part."""
    repository = repository_of(arguments[0]) if arguments else None
    if repository is None or not is_alone(repository):
        return result
    returned: Any = result
    if isinstance(result, dg.RunRequest):
        returned = _told(result)
    elif isinstance(result, dg.SensorResult) and result.run_requests:
        returned = result._replace(run_requests=[_told(each) for each in result.run_requests])
    return cast("R", returned)


def repository_of(context: object) -> dg.RepositoryDefinition | None:
    """The code location that a tick is of; a tick by hand has none."""
    found = getattr(context, CONTEXT_REPOSITORY, None)
    return found if isinstance(found, dg.RepositoryDefinition) else None


def in_one_process(context: object, result: dg.SensorResult) -> dg.SensorResult:
    """``result``, whose runs are of assets alone: a job of ours says itself how it executes.

    Somebody else's executor, if the code location has one, is used as it is.
    """
    repository = repository_of(context)
    if repository is None or not result.run_requests or not _has_no_executor(repository):
        return result
    requests = [each.with_replaced_attrs(run_config=_IN_PROCESS) for each in result.run_requests]
    return result._replace(run_requests=requests)


@lru_cache(4)
def _has_no_executor(repository: dg.RepositoryDefinition) -> bool:
    job = repository.get_implicit_global_asset_job_def()
    return job.executor_def is dg.multi_or_in_process_executor


def _told(request: dg.RunRequest) -> dg.RunRequest:
    return request.with_replaced_attrs(tags={**request.tags, PART_TAG: "true"})


@lru_cache(4)
def is_alone(repository: dg.RepositoryDefinition) -> bool:
    """Whether all in ``repository`` is of sources that this process has built, and serves alone.

    Dagster looks up what sensors, schedules and inputs of assets name when it loads them.
    """
    if not is_told_to_serve_alone():
        return False
    ours = {key for c in sources().values() for key in (health_key(c), marks_key(c))}
    ours.update(k for c in sources().values() for names in all_tables(c) for k in names.keys)
    if not ours.issuperset(repository.assets_defs_by_key):
        return False
    tags = [each.tags for each in repository.sensor_defs]
    tags += [each.tags for each in repository.schedule_defs]
    return all(told.get(SOURCE_TAG) in sources() for told in tags)
