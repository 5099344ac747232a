"""The follower: one long-lived process a source that merges (``materializer: follow``).

It is a child of the code server, kept by the sensor ``materializer_<source>``, and a worker among
others (``materializer.workers``). It reports tables as a run does (``assets.reports``), by events
that belong to no run. Why a table can't go on is told by the alerts and by ``health/<source>``.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Self

import dagster as dg
import psycopg
from pyspark.sql import SparkSession

from cdc_assets.config.source import SourceConfig, config_from_parent
from cdc_assets.dagster.assets.reports import REPORT_SECONDS, Reports, added
from cdc_assets.dagster.internals import InstanceRef, deserialize_value, serialize_value
from cdc_assets.dagster.metadata import DATA_VERSION_TAG, data_version
from cdc_assets.dagster.names import all_tables
from cdc_assets.errors import FollowerProblem, SparkProblem
from cdc_assets.lake.spark.session import open_session, server, spark_problem
from cdc_assets.log.sessions.workers import KnownWorker
from cdc_assets.materializer.drain import Drained
from cdc_assets.materializer.workers.follower import Listener
from cdc_assets.materializer.workers.turns import Turn, Turns
from cdc_assets.operations.merging import follow
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.process import children
from cdc_assets.process.children import ChildSpec
from cdc_assets.process.helper_thread import HelperThread
from cdc_assets.process.home import home
from cdc_assets.process.lifeline import die_with_parent, read_settings
from cdc_assets.process.traces import log_level, log_to_stderr, noted
from cdc_assets.readiness.foreign_errors import explained

logger = logging.getLogger("cdc_assets.dagster.follower")

# How often it is looked whether there is something to report, and at most after errors.
_STEP_SECONDS, _LONGEST_SECONDS = 1.0, 60.0
# A follower that waits for a database or for Spark says so at least once a minute.
HUNG_SECONDS = 180.0


def is_running(config: SourceConfig) -> bool:
    """Whether this process has a follower of the source."""
    return children.child_of(_child(config)) is not None


def keep(config: SourceConfig, instance: dg.DagsterInstance, workers: Sequence[KnownWorker]) -> str:
    """Keep the follower running; a sentence on whether it works. ``workers``: the source's.

    Raises FollowerProblem if it ended by itself, or hung and was ended.
    """
    settings = {"source": config.dump(), "instance": serialize_value(instance.get_ref())}
    spec = ChildSpec(
        "cdc_assets.dagster.follower",
        log=home() / config.name / "follower.log",
        settings=json.dumps(settings),
    )
    status = children.supervise(_child(config), spec)
    if (end := status.end) is not None:
        raise FollowerProblem(
            f"the follower of {config.name} {end}: {status.last_words}",
            f"{status.again}; its log is {spec.log}.",
        )
    name = children.process_name(status.pid)
    # One that began anew may be there twice for a moment.
    its = [worker for worker in workers if worker.process == name]
    if any(worker.alive for worker in its):
        return f"The follower (pid {status.pid}) is at work."
    heard = [worker.heard_seconds_ago for worker in its if worker.heard_seconds_ago is not None]
    _end_if_hung(config, min(heard, default=None))
    return f"The follower (pid {status.pid}) isn't at work. {children.last_words(spec.log)}"


def _child(config: SourceConfig) -> str:
    return f"follower:{config.name}"


def _end_if_hung(config: SourceConfig, heard_seconds_ago: float | None) -> None:
    """End a follower that isn't at work and doesn't say why; one that waits says so.

    ``heard_seconds_ago``: its last heartbeat as a worker, if it is one.
    """
    child = children.child_of(_child(config))
    if child is None:
        return
    silent = child.silent_seconds  # one that has nothing to do writes nothing either
    if heard_seconds_ago is not None:
        silent = min(silent, heard_seconds_ago)
    if silent < HUNG_SECONDS:
        return
    child.stop(timeout_seconds=0.0)
    raise FollowerProblem(
        f"the follower of {config.name} (pid {child.pid}) hung: it wasn't heard of for"
        f" {silent:.0f} s, and was ended.",
        f"It is started again in a moment; its log is {child.spec.log}.",
    )


class Reporter(Listener):
    """Reports what a follower does, in a thread and by a session of its own.

    Whatever Dagster's storage has, merges go on, and what they did is told later. What a follower
    didn't live to tell is told by the next one: of each table that streams the newest event is
    compared with what is applied. ``opened`` opens Dagster's instance.
    """

    def __init__(self, config: SourceConfig, opened: Callable[[], dg.DagsterInstance]) -> None:
        super().__init__(logger.info)
        self._config = config
        self._opened = opened
        self._keys = {names.table: names.lake for names in all_tables(config)}
        self._done = SimpleQueue[Drained]()
        # The offset up to which each table that streams is applied, and the follower's own tables.
        self._look: tuple[Mapping[TableId, int], frozenset[TableId]] = ({}, frozenset())
        # When a table that is seen to stream is to be compared; never again once it was.
        self._compare_at = dict[TableId, float]()
        self._sums = dict[TableId, Drained]()
        self._instance: dg.DagsterInstance | None = None
        self._pipeline: Pipeline | None = None
        self._reports: Reports | None = None
        self._thread = HelperThread(
            "reports",
            self._step,
            _STEP_SECONDS,
            longest_seconds=_LONGEST_SECONDS,
            at_end=lambda: self._step(at_once=True),
        )

    def over(self, turn: Turn) -> None:
        if turn.drained is not None and turn.drained.moved:
            self._done.put(turn.drained)

    def looked(self, turns: Turns) -> None:
        self._look = turns.offsets, turns.mine

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.close()

    def _step(self, *, at_once: bool = False) -> None:
        while not self._done.empty():  # first: whatever is wrong, it must not grow
            drained = self._done.get()
            self._sums[drained.table] = added(self._sums.get(drained.table), drained)
        try:
            reports, pipeline, instance = self._ready()
            for table in list(self._sums):
                reports.add(self._sums.pop(table))
            offsets, mine = self._look
            for table in self._untold(pipeline, instance, offsets):
                self._compare_at[table] = time.monotonic() + REPORT_SECONDS
                with _said(table):
                    reports.introduce(table)
                    self._compare_at[table] = math.inf
            for table, offset in offsets.items():
                if table not in mine:
                    with _said(table):
                        reports.of_other(table, offset)
            reports.tell_due(at_once=at_once)
        except psycopg.Error:
            self._hang_up()
            raise
        if at_once:
            self._hang_up()

    def _ready(self) -> tuple[Reports, Pipeline, dg.DagsterInstance]:
        if self._instance is None:
            self._instance = self._opened()
        if self._pipeline is None:
            self._pipeline = Pipeline.open(self._config)
        if self._reports is None:
            log = self._instance.report_runless_asset_event
            tables = all_tables(self._config)
            self._reports = Reports(self._config, self._pipeline.store, tables, log)
        self._reports.store = self._pipeline.store
        return self._reports, self._pipeline, self._instance

    def _hang_up(self) -> None:
        if self._pipeline is not None:
            self._pipeline.close()
            self._pipeline = None

    def _untold(
        self, pipeline: Pipeline, instance: dg.DagsterInstance, offsets: Mapping[TableId, int]
    ) -> Iterator[TableId]:
        """The tables just seen to stream whose newest event isn't of what is applied."""
        due = {table: self._compare_at.get(table, 0.0) for table in offsets}
        self._compare_at = {table: at for table, at in due.items() if at}
        now = time.monotonic()
        fresh = sorted(table for table, at in due.items() if at <= now)
        if not fresh:
            return
        epochs = {row.table: row.epoch for row in pipeline.store.tables()}
        last = instance.get_latest_materialization_events([self._keys[table] for table in fresh])
        for table in fresh:
            event = last.get(self._keys[table])
            told = event.asset_materialization if event is not None else None
            version = data_version(epochs.get(table, 0), offsets[table])
            if told is None or (told.tags or {}).get(DATA_VERSION_TAG) != version:
                yield table
            else:
                self._compare_at[table] = math.inf


@contextmanager
def _said(table: TableId) -> Iterator[None]:
    """Around the report of one table: what is wrong with it stops no other report."""
    try:
        yield
    except psycopg.Error:
        raise
    except Exception as error:  # noqa: BLE001 - a table's own, or Dagster's storage
        logger.warning("%s isn't reported: %s", table, noted(error))


@contextmanager
def _session(config: SourceConfig) -> Iterator[SparkSession]:
    """A session of the server that runs; a local one is the services sensor's to start."""
    if (problem := spark_problem(config)) is not None:
        raise SparkProblem(
            f"Spark Connect can't be reached: {problem}.",
            f"The sensor services_{config.name} starts the local one; else correct spark.remote.",
        )
    session = open_session(config, config.spark.remote or server(config).url())
    try:
        yield session
    finally:
        session.stop()


def main() -> int:
    """The supervised child: 0 after an orderly stop, 1 on an error."""
    log_to_stderr(logging.INFO, stacks=True)
    settings = json.loads(read_settings())
    stop = die_with_parent()
    config: SourceConfig | None = None
    try:
        logging.getLogger().setLevel(log_level())
        for chatty in ("pyiceberg", "alembic"):
            logging.getLogger(chatty).setLevel(logging.WARNING)
        config = config_from_parent(settings["source"])
        ref = deserialize_value(settings["instance"], InstanceRef)
        tables = [table.id for table in config.tables]
        with Reporter(config, lambda: dg.DagsterInstance.from_ref(ref)) as reporter:
            follow(config, tables, stop, reporter, lambda: _session(config))
    except Exception as error:  # noqa: BLE001 - whatever it is, the log's last line is quoted
        logger.error("%s", explained(error, config))  # noqa: TRY400
        return 1
    logger.info("stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
