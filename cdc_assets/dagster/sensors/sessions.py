"""What outlives a tick: a connection to the log, and Dagster's instance."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dagster as dg

from cdc_assets.config.source import SourceConfig
from cdc_assets.pipeline import Pipeline

_idle: dict[tuple[str, str, str], Pipeline] = {}
_instances: list[dg.DagsterInstance] = []
_lock = threading.Lock()


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
