"""Copying tables: snapshot, resync, resume."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress

import psycopg
from pyspark.errors import PySparkException

from cdc_assets.errors import (
    CdcError,
    CopyRestarted,
    Fenced,
    SlotBusy,
    SnapshotLost,
    TableProblem,
    TablesFailed,
)
from cdc_assets.log.asked.wishes import resume as resume_pauses
from cdc_assets.log.asked.wishes import take_up_again
from cdc_assets.log.copies.chunks import restart_copy
from cdc_assets.log.states import TableState
from cdc_assets.log.store import LogStore
from cdc_assets.log.table_row import TableRow
from cdc_assets.masks import rules_of
from cdc_assets.messages.findings import Finding
from cdc_assets.operations.running import Spark, flushing
from cdc_assets.pins.pins import Pins
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.process.traces import noted
from cdc_assets.snapshot.coordinator import copy_tables
from cdc_assets.snapshot.progress import CopyProgress

logger = logging.getLogger(__name__)


# Pinning waits for the transactions that run at the source; slot creation itself gives up earlier.
_PIN_PATIENCE_SECONDS = 180
_PIN_LOOK_SECONDS = 2.0
# Retries of copies that have to begin anew (after TRUNCATE, say); then the tables are reported.
_COPY_TRIES = 5
_ANEW = (CopyRestarted, SnapshotLost, Fenced)


def snapshot(
    pipeline: Pipeline,
    spark: Spark,
    tables: Sequence[TableId],
    on_progress: Callable[[CopyProgress], None],
    *,
    streams: bool = False,
) -> None:
    """Pin and copy what isn't copied yet. Raises TablesFailed naming the tables that failed.

    A table whose copy has to begin anew (it was truncated, its pin was lost) gets some more tries.
    WAL would pile up at the source if nobody streamed during a copy: a flusher is started unless
    one is active, or the caller has one (``streams``).
    """
    pins = Pins(pipeline)
    beside = ExitStack()
    try:
        pins.prepare()
        problems: list[TableProblem] = []
        again = list(tables)
        for last in [False] * _COPY_TRIES + [True]:
            to_copy = []
            for table, row in _pinned(pipeline.store, pins, again).items():
                if row.state == TableState.WAITING:
                    problems.append(_not_pinned(table, row.reason, pins.refused.get(table)))
                elif row.state == TableState.PARKED:
                    problems.append(TableProblem(table, row.reason or "it is parked"))
                elif row.state == TableState.COPYING:
                    to_copy.append(table)
            streams = (
                streams
                or not pipeline.config.streams  # there is nothing to stream
                or pipeline.store.has_flusher()
            )
            if to_copy and not streams:
                beside.enter_context(flushing(pipeline.config))
                streams = True
            failed = _copy_all(pipeline, spark, to_copy, pins, on_progress) if to_copy else {}
            again = [table for table, error in failed.items() if isinstance(error, _ANEW)]
            problems += [
                TableProblem.of(table, error)
                for table, error in failed.items()
                if last or table not in again
            ]
            if not again:
                break
        with suppress(SlotBusy):
            pins.tick()
        if problems:
            raise TablesFailed(problems)
    finally:
        beside.close()
        pins.close()


def resync(
    pipeline: Pipeline,
    spark: Spark,
    tables: Sequence[TableId],
    on_progress: Callable[[CopyProgress], None],
) -> None:
    """Copy ``tables`` anew while the others flow; readers see the old rows until it is complete.

    This works in any state of a table; the source's description of it is taken anew, too. Raises
    like :func:`snapshot`.
    """
    mark_for_copy(pipeline, tables)
    snapshot(pipeline, spark, tables, on_progress)


def mark_for_copy(pipeline: Pipeline, tables: Sequence[TableId]) -> None:
    """Mark ``tables`` to be copied anew, by a command or by Dagster's sensors."""
    for table in tables:
        row = pipeline.store.table(table)
        if row is not None:  # else the first start describes it
            # First: a flusher of another configuration would describe it, and have it copied.
            config = pipeline.config
            masks, where = rules_of(config.masks(table) or {}), config.row_filters.get(table)
            pipeline.store.wish(table, masks, where)
            restart_copy(pipeline.store, row)


def resume(pipeline: Pipeline) -> bool:
    """End the source's pause. True if the source had been dropped, and is taken up again."""
    resume_pauses(pipeline.store)
    return take_up_again(pipeline.store)


def _pinned(store: LogStore, pins: Pins, tables: Sequence[TableId]) -> dict[TableId, TableRow]:
    """The tables' rows once none waits for a pin any longer, or none will get one soon."""
    deadline = time.monotonic() + _PIN_PATIENCE_SECONDS
    while True:
        busy = False
        try:
            pins.tick()
        except SlotBusy as error:
            logger.warning("%s", error)
            busy = True
        rows = {row.table: row for row in store.tables()}
        found = {table: rows[table] for table in tables}  # prepare() registered all of them
        waits = any(
            row.state == TableState.WAITING and not pins.has_refused(row.table)
            for row in found.values()
        )
        if not waits or busy or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def _not_pinned(table: TableId, reason: str | None, refused: Finding | None) -> TableProblem:
    if refused is not None:
        said = refused.message.removeprefix(f"{table}: ")
        return TableProblem(table, f"{refused.code}: {said}", refused.remedy)
    return TableProblem(
        table,
        f"it still waits for its pin{f' ({reason})' if reason else ''}.",
        "A long transaction at the source holds up its pin (see pg_stat_activity), or the"
        " flusher that streams doesn't get on (see its log).",
    )


def _copy_all(
    pipeline: Pipeline,
    spark: Spark,
    tables: Sequence[TableId],
    pins: Pins,
    on_progress: Callable[[CopyProgress], None],
) -> dict[TableId, CdcError]:
    """Copy ``tables``; returns the failures, by table."""
    with spark.session() as session, Pipeline.open(pipeline.config) as own:
        with ThreadPoolExecutor(1) as coordinator:
            stop = threading.Event()
            copied = coordinator.submit(
                copy_tables, own, session, tables, on_progress=on_progress, stop=stop
            )
            try:
                while not wait([copied], timeout=_PIN_LOOK_SECONDS).done:
                    # Holds the pins if no flusher does, and pins a table again whose pin was lost.
                    with suppress(SlotBusy):  # somebody else's table waits
                        pins.tick()
            except BaseException:
                stop.set()
                session.interruptAll()
                raise
        try:
            return copied.result()
        except (PySparkException, psycopg.Error) as error:
            told = noted(error)
            return {table: TableProblem(table, told) for table in tables}
