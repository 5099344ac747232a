"""A Spark task of a copy: claim chunks, read them, write a Parquet file, record it.

A task lives until nothing is left to claim, so one table costs a few long tasks. It claims some
neighbouring chunks at a time, reads them in one short transaction under the pinned snapshot (each
in several, under snapshots of the moment, if the copy is incremental), writes their rows to one
file below the lake table's location, and records the file with its claim: from then on any
coordinator can commit it (``snapshot.landing``). A task whose coordinator died goes on and loses
nothing; one that was fenced deletes what it wrote.

This module runs inside Spark's Python workers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import psycopg
import pyarrow as pa
from psycopg import sql

from cdc_assets.errors import first_line
from cdc_assets.log.copies.claims import Claimed, Claims, Written
from cdc_assets.pins.reader import OpenTransaction, Read, snapshot_reader
from cdc_assets.postgres.catalog import NO_FILE
from cdc_assets.postgres.copy_out.kinds import INT8, TEXT
from cdc_assets.postgres.ctid import CtidRange
from cdc_assets.postgres.horizon import FLUSH
from cdc_assets.postgres.names import TableId, quoted
from cdc_assets.postgres.types import refused_array
from cdc_assets.snapshot.convert import DoesNotFit
from cdc_assets.snapshot.lake_file import LakeFile
from cdc_assets.snapshot.pace import Pace
from cdc_assets.snapshot.planned import CopyTask, Rewritten, as_planned, rows_of

# SQL states that a coordinator can do something about.
# invalid_parameter_value, undefined_object, object_not_in_prerequisite_state
_SNAPSHOT_GONE = ("22023", "42704", "55000")
# A standby ends whoever needs rows that VACUUM has removed at the primary; others only read here.
_CONFLICT = "40001"
TABLE_CHANGED = ("42P01", "42703", "42804", "3F000")  # undefined table, column, datatype, schema

# How many pages a heap has, and where the WAL ends: as of now, and not of the snapshot.
_PAGES = sql.SQL(
    "select pg_catalog.pg_relation_size({}::oid) / pg_catalog.current_setting('block_size')::bigint"
)
_END = sql.SQL("select pg_catalog.pg_current_wal_insert_lsn()::text").format()
_FLUSH = sql.SQL(FLUSH).format()

OUTCOME_SCHEMA = "table_name string, outcome string, detail string"


def copy_worker(
    tasks: Sequence[CopyTask],
) -> Callable[[Iterable[pa.RecordBatch]], Iterable[pa.RecordBatch]]:
    """For ``mapInArrow``: works on one table after the other, and yields each one's outcome.

    ``done``; ``lost`` (the snapshot is gone); ``rewritten`` (the table has a new file); ``changed``
    (table or columns are other than planned); ``unfit`` (a value of a column whose policy is fail);
    ``cut`` (the lake's store doesn't take a file); ``failed``. The detail is a sentence, or that
    column's name. All tables are of one source and one coordination database.
    """

    def work(numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in [n for batch in numbers for n in batch.column(0).to_pylist()]:
            claims = Claims(tasks[0].scope, f"{tasks[0].worker}/{os.getpid()}")
            try:
                with snapshot_reader(tasks[0].source_uri) as open_transaction:
                    for task in tasks:
                        claims.serve(task.scope)
                        outcome, detail = _outcome(task, claims, open_transaction)
                        yield pa.record_batch(
                            {
                                "table_name": [task.scope.table],
                                "outcome": [outcome],
                                "detail": [detail],
                            }
                        )
            finally:
                claims.close()

    return work


def _outcome(task: CopyTask, claims: Claims, open_transaction: OpenTransaction) -> tuple[str, str]:
    pace, file = Pace(task.hold_at_most), None
    try:
        while chunks := claims.take():
            location, io, epoch = task.location, dict(task.io), task.scope.epoch
            with LakeFile(location, io, epoch, task.fields, like=file) as file:
                if task.snapshot_name is not None:
                    with as_planned(task, chunks, open_transaction) as (run, heaps):
                        written = [
                            _copy(task, run, chunk, _pages(chunk), heaps[chunk.oid], file)
                            for chunk in chunks
                        ]
                else:
                    written = [
                        _copy_in_parts(task, chunk, open_transaction, pace, file)
                        for chunk in chunks
                    ]
                    # What a snapshot shows of a commit that isn't flushed may be lost in a crash,
                    # and with it this session: then nothing of the claim counts.
                    with open_transaction(None) as run:
                        rows_of(run, _FLUSH, (TEXT, TEXT))
            if not claims.wrote(written, file.path):
                file.delete()
    except Rewritten as error:
        return "rewritten", str(error)
    except DoesNotFit as error:
        return "unfit", str(error)
    except psycopg.Error as error:
        if (column := refused_array(str(error))) is not None:
            return "unfit", column
        text = first_line(error)
        if error.sqlstate in _SNAPSHOT_GONE and "snapshot" in text:
            return "lost", text
        if error.sqlstate == _CONFLICT:
            return "lost", text
        if error.sqlstate in TABLE_CHANGED:
            return "changed", text
        return "failed", text
    except Exception as error:  # noqa: BLE001 - one table's, told; the others go on
        outcome = "cut" if isinstance(error, OSError) else "failed"
        return outcome, f"{type(error).__name__}: {first_line(error)}"
    finally:
        claims.release()
    return "done", ""


def _pages(chunk: Claimed) -> CtidRange:
    return CtidRange(chunk.first_block, chunk.end_block)


def _copy_in_parts(
    task: CopyTask,
    chunk: Claimed,
    open_transaction: OpenTransaction,
    pace: Pace,
    file: LakeFile,
) -> Written:
    """Read a chunk in short transactions: between them no snapshot holds VACUUM back.

    What moves between them is in the log, which is applied up to ``read_lsn`` at least.
    """
    with open_transaction(None) as run:
        ((size,),) = rows_of(run, _PAGES.format(sql.Literal(chunk.oid)), (INT8,))
    parts = list[Written]()
    for pages in pace.parts(_pages(chunk), size or 0):
        began = time.monotonic()
        with as_planned(task, [chunk], open_transaction) as (run, heaps):
            ((lsn,),) = rows_of(run, _END, (TEXT,))
            part = _copy(task, run, chunk, pages, heaps[chunk.oid], file)
        end = (size or 0) if pages.end_block is None else pages.end_block
        pace.took(time.monotonic() - began, end - pages.first_block)
        parts.append(replace(part, read_lsn=lsn))
    return Written(
        chunk.key,
        sum(part.rows for part in parts),
        sum(part.bytes for part in parts),
        sum(part.seconds for part in parts),
        parts[-1].read_lsn,
    )


def _copy(
    task: CopyTask, run: Read, chunk: Claimed, pages: CtidRange, heap: TableId, file: LakeFile
) -> Written:
    began, rows, size = time.monotonic(), 0, 0
    relation = heap.identifier.as_string(None)
    # A filter may name the table, whose rows are those of a partition here.
    called = quoted(task.table.name) if task.row_filter is not None else ""
    among = pages.predicate if chunk.filenode != NO_FILE else "true"
    query = f"select {task.columns} from only {relation} {called} where {among}"
    if task.row_filter is not None:
        query += f" and ({task.row_filter})"
    for batch in run(query, [field.kind for field in task.fields]):
        rows, size = rows + batch.num_rows, size + batch.nbytes
        file.write(batch)
        del batch  # keep no reference here, either
    return Written(chunk.key, rows, size, time.monotonic() - began)
