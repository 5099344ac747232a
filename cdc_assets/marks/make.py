"""Making a mark, having every table reach it, and dropping it.

What a mark is, and why no merge passes it, is in ``log.asked.marks``. Whoever merges a table tags
it on the way; a table of which nothing waits is tagged here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress

import psycopg
from pyiceberg.table.refs import SnapshotRefType
from pyspark.sql import SparkSession

from cdc_assets.errors import (
    ConfigurationError,
    Fenced,
    TableProblem,
    TablesFailed,
    first_line,
)
from cdc_assets.flusher.reach import reach
from cdc_assets.lake.drafts.branches import patiently
from cdc_assets.lake.spark.session import lost_server
from cdc_assets.lake.spark.sql import ticked
from cdc_assets.lake.tables import LakeTable
from cdc_assets.log.asked import marks as log
from cdc_assets.log.asked.marks import Mark, MarkState
from cdc_assets.log.locks import write_lock
from cdc_assets.log.states import TableState
from cdc_assets.marks.publish import publish_marker, refuse_unmarked
from cdc_assets.materializer.drain import drain
from cdc_assets.messages.texts import command, meant
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.slots import current_lsn
from cdc_assets.readiness.foreign_errors import explained

# How long tables that others merge are waited for; they are tagged later, then.
PATIENCE_SECONDS = 600.0
_PAUSE_SECONDS = 0.5


def mark(
    pipeline: Pipeline,
    session: SparkSession,
    name: str,
    *,
    scheduled: bool = False,
    known: bool = False,
    published: bool = False,
    on_progress: Callable[[str], None] = lambda _: None,
    patience_seconds: float = PATIENCE_SECONDS,
) -> Mark:
    """Tag every lake table at one LSN: all that is committed now, and nothing that commits later.

    One that was begun, and that tables wait for, is gone on with. Raises ConfigurationError if
    there is another one of that name; with ``known``, that one is returned. ``published``: every
    deployment of the source makes it, by the source's table of markers. Tables that are left
    pending are paused, or merged by others for long: they are tagged when their merges come there.
    """
    log.refuse_name(name)
    store = pipeline.store
    if not any(known or made.of(MarkState.PENDING) for made in log.marks(store, name)):
        if published and log.marks(store, name):
            raise log.exists_already(name)
        with pipeline.connect_source("mark") as source:
            marker = publish_marker(source, pipeline.config, name) if published else None
            now = current_lsn(source)
        on_progress(f"waiting for the log to come to {now}")
        reach(pipeline, now)
        if marker is None:
            log.make(store, name, [t.id for t in pipeline.config.tables], scheduled=scheduled)
        elif not log.marks(store, name):  # one that was interrupted may have published it, too
            refuse_unmarked(store, marker)
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
        if _ends_all(error):
            raise
        on_progress(f"{table}: {first_line(explained(error, pipeline.config))}")
        return False
    return True


def _ends_all(error: Exception) -> bool:
    """Whether an error is of Spark's server or of a database, and no table's."""
    return lost_server(error) or isinstance(error, psycopg.Error)


def _known(pipeline: Pipeline, name: str) -> Mark:
    """The mark; raises ConfigurationError if there is none of that name."""
    for found in log.marks(pipeline.store, name):
        return found
    close = meant(name, log.names(pipeline.store))
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
    # One that was missed may have the tag: of a writer that ended before it recorded that.
    for table in (marked.table for marked in found.tables):
        try:
            # Whoever is about to tag it has the lock.
            with store.locked(write_lock(table)) if table in waiting else nullcontext():
                _untag(pipeline, session, table, found.tag)
        except Exception as error:  # one table's: the others' tags are dropped
            if _ends_all(error):
                raise
            problems.append(TableProblem(table, first_line(explained(error, pipeline.config))))
    if problems:
        raise TablesFailed(problems)
    log.forget(store, name)


def _untag(pipeline: Pipeline, session: SparkSession, table: TableId, tag: str) -> None:
    config, row = pipeline.config, pipeline.store.table(table)
    if row is None or table not in {known.id for known in config.tables}:
        return  # it was given up
    lake = LakeTable(config, config.table(table), row)
    loaded = lake.load()
    made = loaded.metadata.refs.get(tag) if loaded is not None else None
    if made is not None and made.snapshot_ref_type == SnapshotRefType.TAG:
        dropped = f"alter table {lake.sql_name} drop tag if exists {ticked(tag)}"
        patiently(session, lake, dropped)


def surplus(pipeline: Pipeline) -> Sequence[str]:
    """The names of the scheduled marks that are more than ``marks.keep``, the oldest first."""
    return log.names(pipeline.store, only_scheduled=True)[: -pipeline.config.marks.keep]
