"""How often a sensor looks, and what its tick does while something else is still starting up.

A tick costs some 50 ms of CPU whatever it finds, most of it Dagster's, so ticks are rare; that
alone would make a first start slow, where each sensor waits for what another one starts. So a tick
that finds what it needs missing looks again each second, itself, until its next one is due. Every
error but that is a sensor's error and shows as one.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import dagster as dg
import psycopg

from cdc_assets.config.source import SourceConfig
from cdc_assets.dagster.sensors.location import told
from cdc_assets.dagster.sensors.sessions import keep_instance
from cdc_assets.errors import EnvironmentProblem, first_line

# The sensor daemon looks every 5 seconds for sensors that are due: each third look finds these.
# What they supervise (Spark, flusher, follower) is started again that soon after it ended.
PACE_SECONDS = 13
# How long a tick looks again for what is missing: the daemon's next look should find it over.
WAIT_SECONDS = 12.0
AGAIN_SECONDS = 1.0
# A dear look is repeated more rarely: what is missing may be missing for ever.
_PAUSE_PER_LOOK = 30
# Ticks that wait, of all sources: the threads of the daemon (8 in dagster.yaml) and of the code
# server (4 more than it has cores) are for others, too.
PLACES = 3
# Errors that mean "not there yet" rather than "broken".
_NOT_REACHABLE = (EnvironmentProblem, psycopg.OperationalError)

P = ParamSpec("P")
R = TypeVar("R")

_places = threading.BoundedSemaphore(PLACES)
# One of them at most for what is under way for hours: the others are for what starts up.
_watch = threading.BoundedSemaphore(1)


class NotYet(Exception):
    """What a tick needs isn't there yet; the message says what, and the tick is skipped with it."""


class UnderWay(NotYet):
    """Nothing is missing, but what is under way may end at any moment."""


@contextmanager
def reachable(config: SourceConfig) -> Iterator[None]:
    """Raise :class:`NotYet` where a database of the source can't be reached."""
    try:
        yield
    except _NOT_REACHABLE as error:
        raise NotYet(f"Waiting for the Postgres of {config.name}: {first_line(error)}") from error


def skipped(evaluate: Callable[P, R]) -> Callable[P, R | dg.SkipReason]:
    """``evaluate``, skipped with a sentence where it raises :class:`NotYet`."""

    @functools.wraps(evaluate)
    def tick(*args: P.args, **kwargs: P.kwargs) -> R | dg.SkipReason:
        try:
            return told([*args, *kwargs.values()], evaluate(*args, **kwargs))
        except NotYet as missing:
            return dg.SkipReason(str(missing))

    return tick


def _has_threads(instance: dg.DagsterInstance) -> bool:
    settings = instance.get_settings("sensors")
    return isinstance(settings, Mapping) and bool(settings.get("use_threads"))


def patient(
    evaluate: Callable[[dg.SensorEvaluationContext], R],
) -> Callable[[dg.SensorEvaluationContext], R | dg.SkipReason]:
    """As :func:`skipped`, but ``evaluate`` is called again each second until the next tick is due.

    It is called only once while as many ticks as there are places wait already, or another one for
    what is under way, too; or where sensors have no threads: there the others would wait with it.
    """

    @functools.wraps(evaluate)
    def tick(context: dg.SensorEvaluationContext) -> R | dg.SkipReason:
        keep_instance(context)
        ends = time.monotonic() + WAIT_SECONDS
        has_place = _has_threads(context.instance) and _places.acquire(blocking=False)
        watches = False
        try:
            while True:
                looked = time.monotonic()
                try:
                    return told([context], evaluate(context))
                except NotYet as missing:
                    now = time.monotonic()
                    pause = max(AGAIN_SECONDS, _PAUSE_PER_LOOK * (now - looked))
                    if has_place and not watches and isinstance(missing, UnderWay):
                        watches = _watch.acquire(blocking=False)
                    may = has_place and (watches or not isinstance(missing, UnderWay))
                    if not may or now + pause > ends:
                        return dg.SkipReason(str(missing))
                time.sleep(pause)
        finally:
            if watches:
                _watch.release()
            if has_place:
                _places.release()

    return tick
