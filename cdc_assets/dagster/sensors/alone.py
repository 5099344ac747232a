"""Whether a code location has nobody else's sensors, so that a run may do with a part of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeVar, cast

import dagster as dg

from cdc_assets.dagster.names import schedule_names, sensor_names
from cdc_assets.dagster.part import PART_TAG
from cdc_assets.dagster.resources.sources import sources

R = TypeVar("R")


def told(arguments: Sequence[Any], result: R) -> R:
    """What a tick with these ``arguments`` returns; its runs are told if they may build a part."""
    repository = getattr(arguments[0], "_repository_def", None) if arguments else None
    if not isinstance(repository, dg.RepositoryDefinition) or not is_alone(repository):
        return result
    returned: Any = result
    if isinstance(result, dg.RunRequest):
        returned = _told(result)
    elif isinstance(result, dg.SensorResult) and result.run_requests:
        returned = result._replace(run_requests=[_told(each) for each in result.run_requests])
    return cast("R", returned)


def _told(request: dg.RunRequest) -> dg.RunRequest:
    return request.with_replaced_attrs(tags={**request.tags, PART_TAG: "true"})


@lru_cache(4)
def is_alone(repository: dg.RepositoryDefinition) -> bool:
    """Whether all that ticks in ``repository`` is of the sources that this process has built.

    Dagster looks up what sensors and schedules name when it loads them; all else when it is used.
    """
    ours = {
        name for source in sources() for name in (*sensor_names(source), *schedule_names(source))
    }
    ticking = [each.name for each in repository.sensor_defs]
    ticking += [each.name for each in repository.schedule_defs]
    return ours.issuperset(ticking)
