"""What outlives a tick: a connection to the log, Dagster's instance, and a look at the source.

The sensors of a source tick within seconds of each other, and several need its status, which takes
0.2 s of CPU with 500 tables. Those that act on it collect it; those that tell of it take the same.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import dagster as dg

from cdc_assets.config.source import SourceConfig
from cdc_assets.observe.status import SourceStatus, collect
from cdc_assets.pipeline import Pipeline

# How old another sensor's look may be, for one that tells of it: less than its pace.
LOOK_SECONDS = 10.0

_idle: dict[tuple[str, str, str], Pipeline] = {}
_instances: list[dg.DagsterInstance] = []
_lock = threading.Lock()


@dataclass(slots=True)
class _Look:
    """The last look at a source, and the sensors that have taken it."""

    at: float
    found: SourceStatus
    taken_by: set[str]


_looks = dict[str, _Look]()  # by configuration


def status_of(pipeline: Pipeline, sensor: str, *, within_seconds: float = 0.0) -> SourceStatus:
    """The source's status, as another sensor may have collected it ``within_seconds``.

    No sensor gets the same look twice, or waits for another's. Raises what :func:`collect` raises.
    """
    key, now = pipeline.config.dump(), time.monotonic()
    with _lock:
        look = _looks.get(key)
        if look is not None and now - look.at < within_seconds and sensor not in look.taken_by:
            look.taken_by.add(sensor)
            return look.found
    try:
        found = collect(pipeline)
    except BaseException:
        with _lock:
            _looks.pop(key, None)  # nobody is told that all is well
        raise
    with _lock:
        if (newest := _looks.get(key)) is None or newest.at <= now:
            _looks[key] = _Look(now, found, {sensor})
    return found


def keep_instance(context: dg.SensorEvaluationContext) -> None:
    """Give this tick the instance of the ticks before it.

    Dagster makes one a tick, and reads all migrations of its storage for it: 0.1 s of CPU.
    """
    ref = context.instance_ref
    if ref is None:  # a test's, which came with its instance
        return
    with _lock:
        kept = next((one for one in _instances if one.get_ref() == ref), None)
        if kept is None:
            kept = dg.DagsterInstance.from_ref(ref)
            _instances.append(kept)
    # No public way in; a Dagster that names it otherwise makes its own again.
    context._instance = kept


class ResourceSensor(dg.SensorDefinition):
    """A sensor with resources, which Dagster makes before it calls the sensor's function."""

    def evaluate_tick(self, context: dg.SensorEvaluationContext) -> Any:
        keep_instance(context)
        return super().evaluate_tick(context)


@contextmanager
def session(config: SourceConfig, purpose: str) -> Iterator[Pipeline]:
    """The open pipeline of ``purpose``, used again by the next tick unless this one failed.

    Raises what :meth:`Pipeline.open` raises.
    """
    key = (config.name, purpose, config.dump())
    with _lock:
        pipeline = _idle.pop(key, None)
    if pipeline is None:
        pipeline = Pipeline.open(config)
    try:
        yield pipeline
    except BaseException:
        pipeline.close()
        raise
    with _lock:
        spare = _idle.pop(key, None)
        _idle[key] = pipeline
    if spare is not None:  # two ticks overlapped
        spare.close()


def close_all() -> None:
    """Close what is idle; for tests that stop their database."""
    with _lock:
        pipelines = list(_idle.values())
        _idle.clear()
    for pipeline in pipelines:
        pipeline.close()
