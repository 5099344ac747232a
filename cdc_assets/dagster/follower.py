"""The follower: one long-lived process a source that merges, where ``materializer: follow`` is set.

It is a child of the code server, kept by the sensor ``materializer_<source>``, and a worker among
others (``materializer.workers``). It reports tables as a run does (``assets.reports``), by events
that belong to no run. Why a table can't go on is told by the alerts and by ``health/<source>``.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import dagster as dg
import psycopg
from dagster._core.instance.ref import InstanceRef
from dagster._serdes import deserialize_value, serialize_value
from pyspark.sql import SparkSession

from cdc_assets.config.source import SourceConfig, config_from_parent
from cdc_assets.dagster.assets.reports import Reports
from cdc_assets.dagster.names import all_tables
from cdc_assets.errors import SparkProblem, TableProblem
from cdc_assets.lake.spark.session import open_session, server, spark_problem
from cdc_assets.materializer.workers.follower import Listener
from cdc_assets.materializer.workers.turns import Turn, Turns
from cdc_assets.operations.merging import follow
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.process.children import ChildSpec
from cdc_assets.process.home import home
from cdc_assets.process.lifeline import die_with_parent, read_settings
from cdc_assets.process.traces import log_level, log_to_stderr, noted
from cdc_assets.readiness.foreign_errors import explained

logger = logging.getLogger("cdc_assets.dagster.follower")

# What new tables may take of one look: hundreds are copied together, and merges wait for it.
_INTRODUCING_SECONDS = 0.5
# How long events wait where Dagster can't take them.
_PAUSE_SECONDS = 60.0


def follower_child(config: SourceConfig, instance: dg.DagsterInstance) -> ChildSpec:
    """The child that merges this source, and reports to ``instance``."""
    settings = {"source": config.dump(), "instance": serialize_value(instance.get_ref())}
    return ChildSpec(
        "cdc_assets.dagster.follower",
        log=home() / config.name / "follower.log",
        settings=json.dumps(settings),
    )


class Reporter(Listener):
    """Reports what a follower does. Whatever Dagster's storage has, merges go on."""

    def __init__(self, config: SourceConfig, instance: dg.DagsterInstance) -> None:
        super().__init__(logger.info)
        self._config = config
        self._instance = instance
        self._tables = all_tables(config)
        self._new: set[TableId] | None = None  # tables without any event; None: not asked yet
        self._reports: Reports | None = None
        self._again_at = 0.0

    def begins(self, pipeline: Pipeline) -> None:
        if self._reports is None:
            log = self._instance.report_runless_asset_event
            self._reports = Reports(self._config, pipeline.store, self._tables, log)
        self._reports.store = pipeline.store

    def over(self, turn: Turn) -> None:
        if turn.drained is not None and self._reports is not None:
            self._reports.add(turn.drained)

    def looked(self, turns: Turns) -> None:
        if self._reports is None or time.monotonic() < self._again_at:
            return
        try:
            self._introduce(self._reports, turns)
            for table, offset in turns.offsets.items():
                if table not in turns.mine:
                    self._reports.of_other(table, offset)
            self._reports.tell_due()
        except psycopg.Error:
            raise  # the log's connection: the follower begins anew
        except TableProblem as problem:
            logger.warning("not reported: %s", problem)
        except Exception as error:  # noqa: BLE001 - whatever its storage raises
            logger.error("Dagster wasn't told of merges: %s", noted(error))  # noqa: TRY400
            self._again_at = time.monotonic() + _PAUSE_SECONDS

    def _introduce(self, reports: Reports, turns: Turns) -> None:
        if self._new is None:
            keys = {names.table: names.lake for names in self._tables}
            known = self._instance.get_latest_materialization_events(list(keys.values()))
            self._new = {table for table, key in keys.items() if known.get(key) is None}
        ends = time.monotonic() + _INTRODUCING_SECONDS
        for table in sorted(self._new & set(turns.offsets)):
            self._new.discard(table)  # also if it fails: it is reported with its first merge
            reports.introduce(table)
            if time.monotonic() >= ends:
                break


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
        config = config_from_parent(settings["source"])
        ref = deserialize_value(settings["instance"], InstanceRef)
        with dg.DagsterInstance.from_ref(ref) as instance:
            tables = [table.id for table in config.tables]
            reporter = Reporter(config, instance)
            follow(config, tables, stop, reporter, lambda: _session(config))
    except Exception as error:  # noqa: BLE001 - whatever it is, the log's last line is quoted
        logger.error("%s", explained(error, config))  # noqa: TRY400
        return 1
    logger.info("stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
