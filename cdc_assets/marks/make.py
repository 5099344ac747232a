"""Making a mark, having every table reach it, and dropping it.

What a mark is, and why no merge passes it, is in ``log.asked.marks``. Whoever merges a table tags
it on the way; a table of which nothing waits is tagged here.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress

import psycopg
from pyspark.sql import SparkSession

from cdc_assets.errors import (
    ConfigurationError,
    Fenced,
    TableProblem,
    TablesFailed,
    first_line,
)
from cdc_assets.flusher.reach import reach
from cdc_assets.lake.publish import patiently
from cdc_assets.lake.spark.session import lost_server
from cdc_assets.lake.spark.sql import ticked
from cdc_assets.lake.tables import LakeTable
from cdc_assets.log.asked import marks as log
from cdc_assets.log.asked.marks import Mark, MarkState
from cdc_assets.log.locks import write_lock
from cdc_assets.log.states import TableState
from cdc_assets.materializer.drain import drain
from cdc_assets.messages.texts import command, meant
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.slots import current_lsn
from cdc_assets.readiness.foreign_errors import explained

# How long tables that others merge are waited for; they are tagged later, then.
PATIENCE_SECONDS = 600.0
_PAUSE_SECONDS = 0.5
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def refuse_name(name: str) -> None:
    """Raise ConfigurationError unless ``name`` may be a mark's: it becomes a tag's, too."""
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"{name!r} can't be the name of a mark.",
            "Take up to 64 letters, digits, dots, dashes and underscores; a letter or digit first.",
        )


def mark(
    pipeline: Pipeline,
    session: SparkSession,
    name: str,
    *,
    scheduled: bool = False,
    on_progress: Callable[[str], None] = lambda _: None,
    patience_seconds: float = PATIENCE_SECONDS,
) -> Mark:
    """Tag every lake table at one LSN: all that is committed now, and nothing that commits later.

    One that was begun, and that tables wait for, is gone on with. Raises ConfigurationError if
    there is another one of that name. Tables that are left pending are paused, or merged by others
    for long: they are tagged when their merges come there.
    """
    refuse_name(name)
    store = pipeline.store
    if not any(known.of(MarkState.PENDING) for known in log.marks(store, name)):
        with pipeline.connect_source("mark") as source:
            now = current_lsn(source)
        on_progress(f"waiting for the log to come to {now}")
        reach(pipeline, now)
        log.make(store, name, [t.id for t in pipeline.config.tables], scheduled=scheduled)
    deadline = time.monotonic() + patience_seconds
    stuck = set[TableId]()
    while left := [t for t in _pending(pipeline, name) if t.table not in stuck]:
        found, before = _known(pipeline, name), len(left)
        on_progress(f"{found.lsn}: {before} of {len(found.tables)} tables have no tag yet")
        if time.monotonic() > deadline:
            break
        for table in left:
            if not _reached(pipeline, session, table.table, table.offset, on_progress):
                stuck.add(table.table)
        if len(_pending(pipeline, name)) == before:
            time.sleep(_PAUSE_SECONDS)  # others merge them
    return _known(pipeline, name)


def _pending(pipeline: Pipeline, name: str) -> list[log.MarkedTable]:
    log.miss_lost(pipeline.store)
    return _known(pipeline, name).of(MarkState.PENDING)


def _reached(
    pipeline: Pipeline,
    session: SparkSession,
    table: TableId,
    offset: int,
    on_progress: Callable[[str], None],
) -> bool:
    """Merge a table up to a mark, unless others do; False if that can't be."""
    try:
        with suppress(Fenced):
            drain(pipeline, session, table, until_offset=offset)
    except TableProblem as problem:  # it is paused, or parked by now
        on_progress(str(problem))
        row = pipeline.store.copy_state(table)
        return row is None or row.state != TableState.STREAMING
    except Exception as error:  # one table's: the others are tagged
        if lost_server(error) or isinstance(error, psycopg.Error):
            raise
        on_progress(f"{table}: {first_line(explained(error, pipeline.config))}")
        return False
    return True


def _known(pipeline: Pipeline, name: str) -> Mark:
    """The mark; raises ConfigurationError if there is none of that name."""
    for found in log.marks(pipeline.store, name):
        return found
    names = [known.name for known in log.marks(pipeline.store)]
    close = meant(name, names)
    raise ConfigurationError(
        f"there is no mark {name} of source {pipeline.config.name}.",
        f"Did you mean {close}?" if close else f"Their names: {command('marks')}",
    )


def drop(pipeline: Pipeline, session: SparkSession, name: str) -> None:
    """Drop a mark with its tags.

    Raises ConfigurationError if there is none of that name, and TablesFailed where a tag couldn't
    be dropped: the mark stays known then, and can be dropped again.
    """
    found, store, problems = _known(pipeline, name), pipeline.store, list[TableProblem]()
    waiting = [marked.table for marked in found.of(MarkState.PENDING)]
    for table in waiting:
        log.settle(store, name, table, None, "it is dropped")
    for table in [*waiting, *(marked.table for marked in found.of(MarkState.TAGGED))]:
        try:
            # Whoever is about to tag it has the lock.
            with store.locked(write_lock(table)) if table in waiting else nullcontext():
                _untag(pipeline, session, table, found.tag)
        except Exception as error:  # noqa: BLE001 - one table's: the others' tags are dropped
            problems.append(TableProblem(table, first_line(explained(error, pipeline.config))))
    if problems:
        raise TablesFailed(problems)
    log.forget(store, name)


def _untag(pipeline: Pipeline, session: SparkSession, table: TableId, tag: str) -> None:
    config, row = pipeline.config, pipeline.store.table(table)
    if row is None or table not in {known.id for known in config.tables}:
        return  # it was given up
    lake = LakeTable(config, config.table(table), row)
    if lake.load() is not None:
        dropped = f"alter table {lake.sql_name} drop tag if exists {ticked(tag)}"
        patiently(session, lake, dropped)


def surplus(pipeline: Pipeline) -> Sequence[str]:
    """The names of the scheduled marks that are more than ``marks.keep``, the oldest first."""
    names = [known.name for known in log.marks(pipeline.store) if known.scheduled]
    return names[: -pipeline.config.marks.keep]
