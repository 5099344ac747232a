"""Reading rows of a chunk in short transactions: each shows the rows of one moment.

A transaction lasts about ``hold_at_most``, so that neither VACUUM nor an ALTER TABLE waits for a
backfill. While it lasts the table's lock is held, and then the catalog is looked at: the pages have
to be of the files that were planned, and the columns those that the lake has.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from queue import Empty, Full, Queue
from threading import Event, Lock, Thread
from typing import Self

import psycopg
import pyarrow as pa
from psycopg import sql

from cdc_assets.backfill.horizons import Horizons, Proven
from cdc_assets.backfill.request import WHOLE
from cdc_assets.errors import TableProblem
from cdc_assets.lake.tables import LakeTable
from cdc_assets.log.relation import told_by_catalog
from cdc_assets.materializer.reread import column_names, refuse_renamed, texts_of_row
from cdc_assets.pins.reader import OpenTransaction, snapshot_reader
from cdc_assets.pins.row_filter import row_filter
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.catalog import NO_FILE, check_oid, heaps
from cdc_assets.postgres.copy_out.kinds import TEXT
from cdc_assets.postgres.ctid import CtidRange
from cdc_assets.postgres.key_lookup import Key
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.publication.row_filters import filtered
from cdc_assets.postgres.session.connect import Connection, uri
from cdc_assets.postgres.slots import current_lsn
from cdc_assets.snapshot.pace import Pace
from cdc_assets.snapshot.planned import rows_of
from cdc_assets.snapshot.worker import TABLE_CHANGED

# Of text, of one transaction; more than so many times that is read again in smaller parts.
PART_BYTES = 16 * 2**20
_FAR_MORE = 4
# More than the rows of a page of any size.
_LINES = 2048
_LOOK_SECONDS = 0.2
# Whoever waits for a locked table neither pauses nor ends.
_PATIENCE = sql.SQL("select pg_catalog.set_config('lock_timeout', '10s', true)").format()
# A transaction that reads by an index isn't cut into parts, but ends after so many times its time.
_LIMIT = sql.SQL("select pg_catalog.set_config('statement_timeout', {}, true)")
_LONGER = 10


class Again(TableProblem):
    """What was read doesn't count: read it anew, once the table is looked at."""


class Rewritten(Again):
    """The chunks are pages of files that the table doesn't have any more: they are planned anew."""


class TooLong(Rewritten):
    """The rows of a condition took longer than the server's planner thought."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a chunk as one transaction saw them.

    ``data``: the rows as JSON, as in ``_data``; ``keys``: theirs. Whatever committed below
    ``horizon.lsn`` was visible; whatever was visible had committed below ``lsn``.
    """

    chunk: int
    keys: Sequence[Key]
    data: pa.Array
    horizon: Proven
    lsn: Lsn
    seconds: float


@dataclass(frozen=True, slots=True)
class End:
    """All parts of a chunk were read."""

    chunk: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What is read of a table. ``files``: see :func:`files_of`; ``predicate``: which rows.

    ``by_index``: a chunk of all pages is read in one transaction, since an index finds the rows.
    """

    lake: LakeTable
    files: str
    predicate: str | None
    hold_at_most: float
    chunks: Sequence[tuple[int, CtidRange]]
    by_index: bool

    @property
    def has_pages(self) -> bool:
        """Whether its rows are in files; those of a view or a foreign table aren't."""
        return not self.files.endswith(f":{NO_FILE}")


def files_of(source: Connection, lake: LakeTable) -> str:
    """The files that hold the table's rows: of each heap its oid and its filenode."""
    found = heaps(source, lake.row.table, lake.row.oid)
    return " ".join(sorted(f"{heap.oid}:{heap.filenode}" for heap in found))


def are_same(planned: str, now: str) -> bool:
    """Whether no heap has another file by now: TRUNCATE, CLUSTER and VACUUM FULL give it one.

    A partition that is gone has no rows to read; those of a new one are in the log.
    """
    files = [dict(heap.split(":") for heap in some.split()) for some in (planned, now)]
    return all(files[1].get(heap, node) == node for heap, node in files[0].items())


def refuse_changed(source: Connection, pipeline: Pipeline, lake: LakeTable, files: str) -> None:
    """Raise Again unless the table has the columns that the lake has; Rewritten for other files."""
    table = lake.row.table
    if not told_by_catalog(source, lake.row, pipeline.config.publication).same(lake.row):
        raise Again(table, "its columns are being altered", "It is read again then.")
    if not are_same(files, files_of(source, lake)):
        raise Rewritten(table, "it was truncated, rewritten or replaced while it was read")


class Readers:
    """Threads that read the chunks of a plan; a context manager."""

    def __init__(self, pipeline: Pipeline, plan: Plan, horizons: Horizons, count: int) -> None:
        self._pipeline, self._plan, self._horizons = pipeline, plan, horizons
        self._left, self._lock = iter(plan.chunks), Lock()
        self._read = Queue[Part | End | BaseException | None](count + 1)
        self._stop = Event()
        self._threads = [
            Thread(target=self._work, name=f"backfill-{number}", daemon=True)
            for number in range(count)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def read(self, seconds: float) -> Iterator[Part | End | None]:
        """What was read, in any order; None if nothing was within ``seconds``.

        Ends with the last chunk. Raises what a reader raised.
        """
        ended = 0
        while ended < len(self._threads):
            try:
                found = self._read.get(timeout=seconds)
            except Empty:
                yield None
                continue
            if isinstance(found, BaseException):
                raise found
            if found is None:
                ended += 1
            else:
                yield found

    def _work(self) -> None:
        try:
            with ExitStack() as stack:
                source = stack.enter_context(self._pipeline.connect_source("backfill"))
                name = f"cdc_assets {self._pipeline.config.name} backfill"
                opened = stack.enter_context(snapshot_reader(uri(self._pipeline.source_dsn, name)))
                reader = _Reader(self._pipeline, self._plan, self._horizons, source, opened)
                while (chunk := self._next()) is not None:
                    for part in reader.parts(*chunk):
                        if not self._put(part):
                            return
                    self._put(End(chunk[0]))
            self._put(None)
        except BaseException as problem:  # noqa: BLE001 - the thread that applies raises it
            self._put(problem)

    def _next(self) -> tuple[int, CtidRange] | None:
        with self._lock:
            return None if self._stop.is_set() else next(self._left, None)

    def _put(self, found: Part | End | BaseException | None) -> bool:
        while not self._stop.is_set():
            with suppress(Full):
                self._read.put(found, timeout=_LOOK_SECONDS)
                return True
        return False


class _Reader:
    """One thread's sessions: ``opened`` reads rows, ``source`` asks what is so meanwhile."""

    def __init__(
        self,
        pipeline: Pipeline,
        plan: Plan,
        horizons: Horizons,
        source: Connection,
        opened: OpenTransaction,
    ) -> None:
        self._pipeline, self._plan, self._horizons = pipeline, plan, horizons
        self._source, self._opened = source, opened
        self._pace = Pace(plan.hold_at_most)

    def parts(self, chunk: int, pages: CtidRange) -> Iterator[Part]:
        """The rows of a chunk."""
        lake = self._plan.lake
        if self._plan.by_index and pages == WHOLE:
            part = self._read(chunk, pages, None, 0)
            assert part is not None  # there is no limit
            yield part
            return
        heap = max((h.pages for h in heaps(self._source, lake.row.table, lake.row.oid)), default=0)
        for some in self._pace.parts(pages, heap):
            yield from self._some(chunk, some, heap)

    def _some(self, chunk: int, pages: CtidRange, heap: int) -> Iterator[Part]:
        """The rows of some pages; in halves if they are far more than a part should have."""
        count = (heap if pages.end_block is None else pages.end_block) - pages.first_block
        most = _FAR_MORE * PART_BYTES if count > 0 else None  # a view has no pages
        part = self._read(chunk, pages, most, count)
        if part is not None:
            yield part
            return
        if count == 1:
            yield from self._lines(chunk, pages.first_block, 0, _LINES)
            if pages.end_block is None:
                yield from self._some(chunk, replace(pages, first_block=heap), heap)
            return
        middle = pages.first_block + count // 2
        yield from self._some(chunk, replace(pages, end_block=middle), heap)
        yield from self._some(chunk, replace(pages, first_block=middle), heap)

    def _lines(self, chunk: int, page: int, first: int, end: int) -> Iterator[Part]:
        """The rows of a page, whose TOAST may have gigabytes: in halves, down to a single row."""
        lines = f"ctid >= '({page},{first})'::tid and ctid < '({page},{end})'::tid"
        most = _FAR_MORE * PART_BYTES if end - first > 1 else None
        part = self._read(chunk, CtidRange(page, page + 1), most, 0, lines)
        if part is not None:
            yield part
            return
        middle = (first + end) // 2
        yield from self._lines(chunk, page, first, middle)
        yield from self._lines(chunk, page, middle, end)

    def _read(
        self,
        chunk: int,
        pages: CtidRange,
        most: int | None,
        count: int,
        lines: str | None = None,
    ) -> Part | None:
        """None if they are more than ``most`` bytes. ``count``: of the pages, if all are read.

        ``lines``: a condition on those of a single page.
        """
        lake, began, source = self._plan.lake, time.monotonic(), self._source
        check_oid(source, lake.row.table, lake.row.oid)
        names = column_names(source, lake)
        # A filter of the table comes first: what it leaves out isn't looked at any further.
        where = [row_filter(source, self._pipeline.config, lake.row), self._plan.predicate]
        by_index = self._plan.by_index and pages == WHOLE
        within = [] if by_index or not self._plan.has_pages else [lines or pages.predicate]
        among = " and ".join([*within, *(f"({one})" for one in where if one is not None)])
        numbers = {c.source.number for c in [*lake.columns, *lake.key]}
        rows = filtered(lake.table.rows, among, [n for at, n in names.items() if at in numbers])
        query = sql.SQL("select {} from {} t").format(texts_of_row(lake, names), rows)
        horizon = self._horizons.proven(source)
        data, keys, size = list[str](), list[Key](), 0
        with unaltered(lake, by_index=by_index), self._opened(None) as run:
            rows_of(run, _PATIENCE, [TEXT])
            if by_index:
                most_seconds = _LONGER * self._plan.hold_at_most
                rows_of(run, _LIMIT.format(sql.Literal(f"{most_seconds}s")), [TEXT])
            for batch in run(query.as_string(source), [TEXT] * len(lake.columns)):
                size += batch.nbytes
                if most is not None and size > most:
                    return None  # the session is closed for that; the next one is opened
                add_rows(lake, batch, data, keys)
            refuse_changed(source, self._pipeline, lake, self._plan.files)
            refuse_renamed(source, lake, names)
        seconds = time.monotonic() - began
        if count > 0:
            self._pace.took(max(seconds, self._plan.hold_at_most * size / PART_BYTES), count)
        lsn = current_lsn(source)
        return Part(chunk, keys, pa.array(data, pa.string()), horizon, lsn, seconds)


@contextmanager
def unaltered(lake: LakeTable, *, by_index: bool = False) -> Iterator[None]:
    """The names that a statement has may be those of before an ALTER TABLE.

    ``by_index``: what ends it is the limit of its time; else somebody has canceled it.
    """
    try:
        yield
    except psycopg.errors.QueryCanceled as error:
        if not by_index:
            raise
        what = "its rows took longer to find than the server's planner thought"
        raise TooLong(lake.row.table, what, "All of it is read.") from error
    except psycopg.Error as error:
        if error.sqlstate in TABLE_CHANGED:
            raise Again(lake.row.table, "it is being altered", "It is read again then.") from error
        raise


def add_rows(lake: LakeTable, batch: pa.RecordBatch, data: list[str], keys: list[Key]) -> None:
    """Append rows of texts as JSON, masked, and their keys."""
    names = [column.source.name for column in lake.columns]
    masks = (column.mask for column in lake.columns)
    texts = [
        (mask.array(values) if mask is not None else values).to_pylist()
        for mask, values in zip(masks, batch.columns, strict=True)
    ]
    places = [lake.columns.index(column) for column in lake.key]
    data += [json.dumps(dict(zip(names, row, strict=True))) for row in zip(*texts, strict=True)]
    keys += zip(*(texts[place] for place in places), strict=True)
