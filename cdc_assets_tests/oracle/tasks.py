"""What commands and runs do to a source's tables, in this process or in one that gets killed.

Children are forked from a server that has imported everything, so that a process of its own costs
no start: ``context().Process(target=…)``.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext

from pyspark.sql import SparkSession

from cdc_assets.config.source import SourceConfig, load_config
from cdc_assets.errors import CdcError, TablesFailed
from cdc_assets.flusher import registrar
from cdc_assets.flusher.flusher import run
from cdc_assets.lake.spark.session import open_session
from cdc_assets.log.copies.chunks import chunks
from cdc_assets.operations import copying, merging, running
from cdc_assets.operations import whole as commands
from cdc_assets.pins.pins import Pins
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.snapshot.coordinator import copy_table

_PIN_LOOKS = 25


class Shared(running.Spark):
    """One session for all that is done; nobody stops it."""

    def __init__(self, config: SourceConfig, session: SparkSession) -> None:
        super().__init__(config)
        self._session = session

    @contextmanager
    def session(self) -> Iterator[SparkSession]:
        yield self._session


def copy(pipeline: Pipeline, spark: Shared, tables: Sequence[TableId]) -> None:
    """As ``snapshot``; whoever streams is started by the oracle."""
    copying.snapshot(pipeline, spark, tables, lambda _: None, streams=True)


def copy_share(pipeline: Pipeline, spark: Shared, tables: Sequence[TableId], share: float) -> None:
    """Pin all, copy a share of each one's chunks; nobody holds the pins afterwards."""
    pins = Pins(pipeline)
    try:
        pins.prepare()
        for _ in range(_PIN_LOOKS):
            pins.tick()
            if all(row.state != "waiting" for row in pipeline.store.tables()):
                break
            time.sleep(0.2)  # a flusher that streams has to know them first
        for table in tables:
            row = pipeline.store.table(table)
            if row is None or row.state != "copying":
                continue
            keys = [c.key for c in chunks(pipeline.store, table, row.epoch)]
            with spark.session() as session:
                only = keys[: max(1, round(len(keys) * share))]
                if len(only) < len(keys):
                    copy_table(pipeline, session, table, only=only)
    finally:
        pins.close()


def merge(pipeline: Pipeline, spark: Shared, tables: Sequence[TableId]) -> None:
    merging.materialize(pipeline, spark, tables)


def maintain(pipeline: Pipeline, spark: Shared, tables: Sequence[TableId]) -> None:
    commands.maintain(pipeline, spark, tables, lambda _: None)


# --- in a child ---

WORK = {"copy": copy, "merge": merge, "maintain": maintain}


def child(config_file: str, log: str, what: str, tables: Sequence[str]) -> None:
    """One of WORK, in this process; exits with 1 where it fails."""
    _say_into(log)
    config = load_config(config_file)
    wanted = [config.table(name).id for name in tables]
    try:
        with Pipeline.open(config) as pipeline:
            WORK[what](pipeline, Shared(config, open_session(config)), wanted)
    except (CdcError, TablesFailed) as error:
        logging.getLogger(__name__).error("%s", error)  # noqa: TRY400 - expected now and then
        os._exit(1)


def flusher(config_file: str, log: str) -> None:
    """The flusher, until SIGTERM."""
    _say_into(log)
    registrar.IDLE_STEP_SECONDS = 0.2  # nobody waits for an idle source
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        run(load_config(config_file), stop=stop)
    except CdcError as error:
        logging.getLogger(__name__).error("%s", error)  # noqa: TRY400 - expected now and then
        os._exit(1)


def _say_into(log: str) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", force=True)


def context() -> ForkServerContext:
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload([__name__])
    return found
