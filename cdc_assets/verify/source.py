"""The source's side of a comparison: its rows as text, read under a snapshot.

The code that copies tables has no part in this: the table is read by its own name, in ranges of
pages, so that Postgres finds the partitions itself; and the rows read are checked against a count
of other ranges of pages. Each range is a short transaction: no ALTER TABLE waits for a comparison.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from cdc_assets.errors import TableProblem
from cdc_assets.lake.tables import LakeTable
from cdc_assets.masks import Mask
from cdc_assets.pins.holders import under
from cdc_assets.pins.reader import TextPlan, TextQuery, read_texts, share
from cdc_assets.pins.row_filter import row_filter
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.catalog import attributes, check_oid
from cdc_assets.postgres.ctid import CtidRange, heap_pages, plan_chunks
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.publication.row_filters import and_filter
from cdc_assets.postgres.session.connect import uri
from cdc_assets.verify.canonical import comparable_text, source_text
from cdc_assets.verify.difference import Fingerprint, fingerprints
from cdc_assets.verify.rows import Beside

# A column with the numbers of the columns whose value has no form in the lake, by commas.
LOST = "lost"
# A column with the number of a row's table among several.
NUMBER = "n"
REWRITTEN = "it was truncated, rewritten or altered while it was read"

# From pg_inherits: the relations of a table's tree that hold rows.
_PARTS = """
with recursive tree as (
    select %(oid)s::oid as oid
    union
    select i.inhrelid from pg_catalog.pg_inherits i join tree t on i.inhparent = t.oid
     where not i.inhdetachpending and not %(only)s
)
select n.nspname, c.relname, coalesce(pg_catalog.pg_relation_size(c.oid), 0) / b.size,
       coalesce(pg_catalog.pg_relation_size(nullif(c.reltoastrelid, 0)), 0) / b.size
  from tree join pg_catalog.pg_class c on c.oid = tree.oid
 cross join (select pg_catalog.current_setting('block_size')::bigint) b (size)
  join pg_catalog.pg_namespace n on n.oid = c.relnamespace
 where c.relkind <> 'p' order by c.oid
"""


@dataclass(frozen=True, slots=True)
class Part:
    """A relation that holds rows of a table, its size, and that of its TOAST table."""

    id: TableId
    pages: int
    toast_pages: int


Cut = Callable[[Sequence[Part]], Iterable[tuple[Part, CtidRange]]]
"""Which pages of a table's parts are read."""


def read_source(
    pipeline: Pipeline,
    session: SparkSession,
    beside: Beside,
    snapshot_name: str,
    cut: Cut | None = None,
) -> DataFrame:
    """The rows under a snapshot, all or those of the pages that ``cut`` picks.

    Their columns are text, named ``t`` and the attribute number, and LOST. Raises TableProblem if
    the source's columns aren't those that the lake table has.
    """
    with closing(pipeline.connect_source("verify")) as source:
        columns, lost = _listed(source, beside)
        listed = sql.SQL(", ").join([*columns.values(), lost])
        where = row_filter(source, pipeline.config, beside.lake.row)
        queries = _queries(source, beside, listed, where, cut, masks=_masks(beside, columns))
    return _read(pipeline, session, snapshot_name, queries, (*columns, LOST))


@dataclass(frozen=True, slots=True)
class Counted:
    """Rows that were read and, by column, how many values have no form in the lake."""

    rows: int
    lost: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Together:
    """All rows of some tables in one frame of texts, each row with its table's number.

    ``p0`` … are the texts of a table's columns, in the order of ``besides``; NULL beyond the last.
    """

    texts: DataFrame
    besides: Sequence[Beside]
    width: int
    """How many columns the widest table has."""

    def counted(self) -> dict[TableId, tuple[Counted, Fingerprint]]:
        """What was read of each table, and its fingerprint in ``width`` cells, in one Spark job."""
        cells, once = [self._cell(place) for place in range(self.width)], F.lit(1).cast("long")
        found = fingerprints(self.texts, cells, once, NUMBER, LOST).collect()
        by_table = dict[TableId, tuple[Counted, Fingerprint]]()
        for number, beside in enumerate(self.besides):
            mine = [(lost, Fingerprint.of(sums)) for n, lost, *sums in found if int(n) == number]
            read = _summed(((lost, some.rows) for lost, some in mine), beside.lake)
            whole = sum((some for _, some in mine), Fingerprint())
            by_table[beside.lake.row.table] = read, whole
        return by_table

    def _cell(self, place: int) -> Column:
        """The comparable text of the column at a place, of whichever table a row is."""
        text = f"p{place}"
        cell = F.col(text)
        for number, beside in enumerate(self.besides):
            if place < len(beside.columns):
                comparable = comparable_text(text, beside.columns[place][1])
                if comparable != text:
                    cell = F.when(F.col(NUMBER) == str(number), F.expr(comparable)).otherwise(cell)
        return cell


def read_together(
    pipeline: Pipeline, session: SparkSession, besides: Sequence[Beside], snapshot_name: str
) -> Together:
    """The rows of several tables under a snapshot; without tables that were altered."""
    queries, lists = list[TextQuery](), list[tuple[Beside, _Listed, str | None]]()
    with closing(pipeline.connect_source("verify")) as source:
        for beside in besides:
            with suppress(TableProblem):
                where = row_filter(source, pipeline.config, beside.lake.row)
                lists.append((beside, _listed(source, beside), where))
        most = max((len(columns) for _, (columns, _), _ in lists), default=0)
        for number, (beside, (columns, lost), where) in enumerate(lists):
            nothing = [sql.SQL("null::text")] * (most - len(columns))
            listed = [sql.Literal(str(number)), *columns.values(), *nothing, lost]
            masks = _masks(beside, columns, first=1)
            queries += _queries(source, beside, sql.SQL(", ").join(listed), where, masks=masks)
    names = (NUMBER, *(f"p{i}" for i in range(most)), LOST)
    texts = _read(pipeline, session, snapshot_name, queries, names)
    return Together(texts, [beside for beside, _, _ in lists], most)


def _masks(beside: Beside, columns: Iterable[str], first: int = 0) -> tuple[tuple[int, Mask], ...]:
    """The masks of ``columns`` (``t`` and number), of which the one at ``first`` is the first."""
    masks = {f"t{column.source.number}": column.mask for column, _ in beside.columns}
    found = ((first + place, masks[name]) for place, name in enumerate(columns))
    return tuple((place, mask) for place, mask in found if mask is not None)


def _queries(
    source: psycopg.Connection[Any],
    beside: Beside,
    listed: sql.Composable,
    where: str | None,
    cut: Cut | None = None,
    *,
    masks: tuple[tuple[int, Mask], ...],
) -> list[TextQuery]:
    """A query a range of pages, of the rows that the filter ``where`` has."""
    lake = beside.lake
    found = parts(source, lake.row.oid, only=lake.table.only)
    ranges: Iterable[tuple[sql.Composable, CtidRange]]
    if cut is not None:
        ranges = (
            (sql.SQL("only {}").format(part.id.identifier), pages) for part, pages in cut(found)
        )
    else:
        ranges = ((lake.table.rows, pages) for pages in whole(found, lake.table.chunk_pages))
    return [
        TextQuery(
            sql.SQL("select {} from {} where {}{}")
            .format(listed, relation, sql.SQL(pages.predicate), and_filter(where))
            .as_string(source),
            masks,
        )
        for relation, pages in ranges
    ]


def _read(
    pipeline: Pipeline,
    session: SparkSession,
    snapshot_name: str,
    queries: Sequence[TextQuery],
    columns: tuple[str, ...],
) -> DataFrame:
    tasks = min(pipeline.config.snapshot.max_parallel_chunks, max(1, len(queries)))
    uri_ = uri(pipeline.source_dsn, f"cdc_assets {pipeline.config.name} verify")
    return read_texts(session, TextPlan(uri_, snapshot_name, share(queries, tasks), columns))


def counted(texts: DataFrame, lake: LakeTable) -> Counted:
    """What was read of a table."""
    return _summed(texts.groupBy(LOST).count().collect(), lake)


def _summed(rows: Iterable[Sequence[Any]], lake: LakeTable) -> Counted:
    """From LOST and how many rows have it."""
    total, lost = 0, Counter[str]()
    for numbers, count in rows:
        total += count
        lost.update(dict.fromkeys((numbers or "").split(","), count))
    names = {str(c.source.number): c.name for c in lake.columns}
    return Counted(total, {names[n]: lost[n] for n in names if lost[n]})


def count_sources(
    pipeline: Pipeline, besides: Iterable[Beside], snapshot_name: str
) -> dict[TableId, int]:
    """How many rows each table has under a snapshot, by Postgres's own count of it."""
    with closing(pipeline.connect_source("verify", reads=True)) as source:
        return {
            b.lake.row.table: _count_source(
                source, b.lake, snapshot_name, row_filter(source, pipeline.config, b.lake.row)
            )
            for b in besides
        }


def _count_source(
    source: psycopg.Connection[Any], lake: LakeTable, snapshot_name: str, where: str | None
) -> int:
    total, chunk_pages = 0, lake.table.chunk_pages
    found = parts(source, lake.row.oid, only=lake.table.only)
    for pages in whole(found, chunk_pages + chunk_pages // 2 + 1, counted=True):
        with under(source, snapshot_name):
            query = sql.SQL("select count(*) from {} where {}{}").format(
                lake.table.rows, sql.SQL(pages.predicate), and_filter(where)
            )
            answer = source.execute(query).fetchone()
            assert answer is not None  # an aggregate without grouping has one row
            total += int(answer[0])
    return total


def parts(source: psycopg.Connection[Any], oid: int, *, only: bool) -> list[Part]:
    """The relations that hold a table's rows: itself, and unless ``only`` those below it."""
    found = source.execute(_PARTS, {"oid": oid, "only": only}).fetchall()
    return [Part(TableId(schema, name), *map(int, sizes)) for schema, name, *sizes in found]


def whole(found: Sequence[Part], chunk_pages: int, *, counted: bool = False) -> list[CtidRange]:
    """Ranges of about ``chunk_pages`` pages over all parts; each range is read of every part.

    They are smaller where most is in TOAST, unless rows are only ``counted``.
    """
    largest = max((part.pages for part in found), default=0)
    total = sum(part.pages for part in found)
    if not counted:
        chunk_pages = heap_pages(chunk_pages, total, sum(part.toast_pages for part in found))
    return plan_chunks(largest, max(1, chunk_pages * largest // max(1, total)))


_Listed = tuple[dict[str, sql.Composable], sql.Composable]


def _listed(source: psycopg.Connection[Any], beside: Beside) -> _Listed:
    """The select list: the columns by their names (``t`` and number), and LOST."""
    row, excluded = beside.lake.row, beside.lake.table.columns.exclude
    check_oid(source, row.table, row.oid)
    wanted = {c.source.number: (c, kind) for c, kind in beside.columns}
    there = {a.number: a for a in attributes(source, row.oid) if not a.dropped}
    left_out = {
        number
        for number, a in there.items()
        if a.generated or a.name in excluded or number in row.excluded_numbers
    }
    if set(there) - left_out - set(wanted) or set(wanted) - set(there):
        raise TableProblem(row.table, REWRITTEN)
    columns: dict[str, sql.Composable] = {}
    lost: list[sql.Composable] = []
    for number, (column, kind) in wanted.items():
        made = source_text(there[number].name, column.source.type, kind, column.policy)
        columns[f"t{number}"] = sql.SQL("{} as {}").format(made.text, sql.Identifier(f"t{number}"))
        if made.lost is not None:
            lost.append(
                sql.SQL("case when {} then {} end").format(made.lost, sql.Literal(str(number)))
            )
    nothing = sql.SQL("null::text")
    # As an array: a function takes a hundred arguments, a table has more columns.
    counted = sql.SQL("nullif(pg_catalog.array_to_string(array[{}]::text[], ','), '')").format(
        sql.SQL(", ").join(lost)
    )
    return columns, sql.SQL("{} as {}").format(counted if lost else nothing, sql.Identifier(LOST))
