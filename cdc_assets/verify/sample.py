"""Comparing some rows of a table with the source at one LSN, at a bounded cost, again and again.

Each run takes the next part of the table, so that a full round of runs has compared all of it:

- *What the source has*: the rows of some neighbouring pages (a TID range scan), every column, are
  compared with what the lake has of their keys. That finds rows which the lake lacks, has twice, or
  has with other values.
- *What only the lake has*: keys of the lake, those whose hash lies in a window, are looked up in
  the source by its index.

Why not one predicate on both sides. A hash of the key is a full scan of the source. A range of keys
uses the index, but a range has an unknown number of rows, and the order of texts is a collation's,
which the lake doesn't have. Pages have neither problem; but what isn't in them can't be missed
there, hence the second half, which reads nothing but an index. The lake's side is one scan of
its key's columns, and of the files that may have the sampled keys.

The point is ``verify``'s: a temporary slot's consistent point c, and the log applied up to c. The
table's writer waits meanwhile, for about as long as a merge takes; both sides are then read as of c
(an exported snapshot; the Iceberg snapshot) while everything goes on. A table that is truncated or
altered meanwhile isn't compared this time.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

import psycopg
from psycopg import sql
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from cdc_assets.errors import CdcError, TableProblem
from cdc_assets.health.representable import doubtful
from cdc_assets.log.store import LogStore
from cdc_assets.materializer.drain import Look, drain
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.catalog import Heap, heaps
from cdc_assets.postgres.ctid import CtidRange
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.pins import under
from cdc_assets.postgres.replication import NewSlot, create_slot
from cdc_assets.spark.tables import LakeTable, ticked
from cdc_assets.verify.balance import SHOWN_KEYS, balance
from cdc_assets.verify.canonical import lake_expression, source_expression
from cdc_assets.verify.rows import as_key, comparable, digested, lake_side, shapes, source_texts

# How long a table's writer may be kept waiting by what isn't ours: transactions that hold up the
# slot, a flusher that isn't level. Longer, and the table is compared another time.
PATIENCE_SECONDS = 20.0
_LOOK_SECONDS = 0.1
# Keys that are looked up at once: few enough for the planner to take the index.
_LOOKUP_KEYS = 500
# No column of Postgres has a name of more than 63 bytes.
_KEY = "key" + "_" * 64
_HASHES = 1_000_000
# Lake types whose order is Postgres's, so that files without the sampled keys can be left out.
_ORDERED = ("int", "bigint")
# With more merges than this before it a table isn't compared: that would be a catch-up.
_BEHIND = 4


@dataclass(frozen=True, slots=True)
class Sampled:
    """What comparing a part of a table found.

    ``share`` of the table, from 0 to 1, from ``begin`` on; ``rows`` of the source were compared
    and ``looked_up`` keys of the lake looked up. ``keys`` and ``columns`` are some that differ.
    ``skipped`` says why nothing was compared.
    """

    table: TableId
    lsn: Lsn | None
    begin: float
    share: float
    rows: int
    looked_up: int
    differing: int
    keys: tuple[str, ...]
    columns: tuple[str, ...]
    skipped: str | None
    seconds: float


def sample(pipeline: Pipeline, session: SparkSession, table: TableId, sample_rows: int) -> Sampled:
    """Compare the next part of ``table``, about ``sample_rows`` rows from either side."""
    began = time.monotonic()
    begin = _begin(pipeline.store, table)
    try:
        found = _compare(pipeline, session, table, sample_rows, begin)
    except (CdcError, psycopg.errors.SyntaxErrorOrAccessRuleViolation) as problem:
        found = Sampled(table, None, begin, 0.0, 0, 0, 0, (), (), str(problem), 0.0)
    else:
        end = found.begin + found.share
        _go_on(pipeline.store, table, 0.0 if end >= 1 else end)
    return replace(found, seconds=time.monotonic() - began)


def _begin(store: LogStore, table: TableId) -> float:
    row = store.connection.execute(
        "select next_share from verified_samples where source = %s and table_name = %s",
        (store.source, str(table)),
    ).fetchone()
    return float(row[0]) if row else 0.0


def _go_on(store: LogStore, table: TableId, share: float) -> None:
    store.connection.execute(
        "insert into verified_samples (source, table_name, next_share) values (%s, %s, %s)"
        " on conflict (source, table_name) do update set next_share = excluded.next_share",
        (store.source, str(table), share),
    )


def _compare(
    pipeline: Pipeline, session: SparkSession, table: TableId, sample_rows: int, begin: float
) -> Sampled:
    lake = comparable(pipeline, table)
    if not lake.key:
        raise TableProblem(
            table, "rows without a key can't be found again", "Only verify compares them."
        )
    before = shapes(pipeline, [table])[table]
    with ExitStack() as cleanup:
        slot, snapshot_id = _at_one_point(
            pipeline, session, table, lambda point: Look(before.told, point)
        )
        cleanup.callback(slot.connection.finish)
        lake = comparable(pipeline, table)  # with the columns that it has by now
        share = min(1.0, sample_rows / max(1, lake.state().total_rows))
        texts = source_texts(
            pipeline,
            session,
            lake,
            slot.snapshot_name,
            lambda found: _pages(found, begin, share),
        ).persist()
        cleanup.callback(texts.unpersist)
        texts.count()
        if shapes(pipeline, [table])[table] != before or set(texts.columns) != {
            f"t{c.source.number}" for c in lake.columns
        }:
            raise TableProblem(table, "it was truncated, rewritten or altered while it was read")
        rows = session.sql(f"select * from {lake.sql_name} version as of {snapshot_id}")
        expressions = [source_expression(c, f"t{c.source.number}") for c in lake.columns]
        read = digested(texts, lake, expressions)
        theirs = lake_side(_of_keys(rows, read, texts, lake), lake, rows)
        found = balance(read, theirs, lake)
        keys = _window(rows, lake, begin, share, sample_rows)
        surplus = _surplus(pipeline, slot.snapshot_name, lake, keys)
        return Sampled(
            table,
            slot.consistent_point,
            begin,
            share,
            found.source_rows,
            len(keys),
            found.differing + len(surplus),
            (*found.keys, *(f"{key} (only in the lake)" for key in surplus))[:SHOWN_KEYS],
            found.columns,
            None,
            0.0,
        )


def _at_one_point(
    pipeline: Pipeline, session: SparkSession, table: TableId, look: Callable[[Lsn], Look]
) -> tuple[NewSlot, int | None]:
    """A slot whose snapshot stands, and the lake's snapshot at its consistent point."""
    store, lock = pipeline.store, f"write:{table}"
    behind = next((b.bytes for b in store.backlogs() if b.table == table), 0)
    if behind > _BEHIND * pipeline.config.lake.merge_bytes:
        raise TableProblem(table, "its log is far behind", "It is compared once that is applied.")
    if not store.lock_within(lock, PATIENCE_SECONDS):
        raise TableProblem(table, "its writer is busy", "It is compared the next time.")
    try:
        name = f"{pipeline.config.slot[:48]}_sample_{uuid.uuid4().hex[:8]}"
        slot = create_slot(
            pipeline.source_dsn, name, temporary=True, patience_seconds=round(PATIENCE_SECONDS)
        )
        try:
            point = slot.consistent_point
            _await_log(store, table, point)
            drain(pipeline, session, table, below=point, look=look(point))
            return slot, comparable(pipeline, table).state().snapshot_id
        except BaseException:
            slot.connection.finish()
            raise
    finally:
        store.unlock(lock)


def _await_log(store: LogStore, table: TableId, point: Lsn) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (flushed := store.flushed_lsn()) is None or flushed < point:
        if time.monotonic() > deadline:
            raise TableProblem(
                table, "the flusher isn't level with the source", "Start it, or see its log."
            )
        time.sleep(_LOOK_SECONDS)


def _pages(found: Sequence[Heap], begin: float, share: float) -> Iterator[tuple[Heap, CtidRange]]:
    """The pages from ``begin`` on, of all heaps one after the other; at least one.

    Where one part ends the next one begins, so a round reads each page once.
    """
    total = sum(heap.pages for heap in found)
    first = min(math.ceil(begin * total), max(0, total - 1))
    end = max(first + 1, math.ceil((begin + share) * total))
    for heap in found:
        low, high = max(0, first), min(heap.pages, end)
        if low < high:
            yield heap, CtidRange(low, high)
        first, end = first - heap.pages, end - heap.pages


def _of_keys(rows: DataFrame, read: DataFrame, texts: DataFrame, lake: LakeTable) -> DataFrame:
    """Those of the lake's rows that have one of the keys of ``read``."""
    if len(lake.key) == 1 and lake.key[0].mapping.lake in _ORDERED:
        text = F.expr(f"try_cast(t{lake.key[0].source.number} as bigint)")
        bounds = texts.agg(F.min(text), F.max(text)).collect()[0]
        if bounds[0] is not None:
            rows = rows.where(F.col(ticked(lake.key[0].name)).between(bounds[0], bounds[1]))
    key = as_key(
        lake, {i: F.expr(lake_expression(c)) for i, c in enumerate(lake.columns) if c.is_key}
    )
    wanted = F.broadcast(read.select(F.col("key").alias(_KEY)))
    return rows.withColumn(_KEY, key).join(wanted, _KEY, "left_semi").drop(_KEY)


def _window(
    rows: DataFrame, lake: LakeTable, begin: float, share: float, sample_rows: int
) -> dict[str, tuple[str, ...]]:
    """The keys of the lake whose hash lies in the window: their columns' texts, by the key's."""
    if any(column in doubtful(lake) and column.policy == "clamp" for column in lake.key):
        return {}  # the lake has other keys than the source, and says so elsewhere
    place = F.pmod(F.xxhash64(*(F.col(ticked(c.name)) for c in lake.key)), F.lit(_HASHES))
    first, end = round(begin * _HASHES), round((begin + share) * _HASHES)
    some = rows.where((place >= first) & (place < end))
    numbers = [lake.columns.index(column) for column in lake.key]
    found = (
        lake_side(some, lake, rows)
        .where("lake > 0")
        .select("key", *(F.col("cells")[number].alias(f"k{number}") for number in numbers))
        .limit(2 * sample_rows)
        .collect()
    )
    # A key that the lake can't hold is NULL there.
    return {row[0]: tuple(row[1:]) for row in found if None not in row[1:]}


def _surplus(
    pipeline: Pipeline,
    snapshot_name: str,
    lake: LakeTable,
    keys: Mapping[str, tuple[str, ...]],
) -> list[str]:
    """Those of ``keys`` that the source doesn't have, by its snapshot."""
    missing: list[str] = []
    listed = list(keys)
    with (
        closing(pipeline.connect_source("sample", reads=True)) as source,
        under(source, snapshot_name),
    ):
        parts = heaps(source, lake.row.table, lake.row.oid)
        whole = any(heap.is_leaf for heap in parts)
        # Values stand in the statement: beside parameters a name with % in it would be one, too.
        query = sql.SQL(
            "select k.n from unnest({arrays}) with ordinality as k ({names}, n)"
            " where not exists (select from {only} {table} t where {equal})"
        )
        names = sql.SQL(", ").join(sql.Identifier(f"k{i}") for i in range(len(lake.key)))
        equal = sql.SQL(" and ").join(
            sql.SQL("t.{} = k.{}::{}").format(
                sql.Identifier(column.source.name),
                sql.Identifier(f"k{i}"),
                sql.SQL(column.source.type),  # as format_type quotes it
            )
            for i, column in enumerate(lake.key)
        )
        for start in range(0, len(listed), _LOOKUP_KEYS):
            some = listed[start : start + _LOOKUP_KEYS]
            arrays = sql.SQL(", ").join(
                sql.SQL("{}::text[]").format(sql.Literal(list(values)))
                for values in zip(*(keys[key] for key in some), strict=True)
            )
            found = source.execute(
                query.format(
                    arrays=arrays,
                    names=names,
                    only=sql.SQL("" if whole else "only"),
                    table=lake.row.table.identifier,
                    equal=equal,
                )
            )
            missing += [some[int(n) - 1] for (n,) in found]
    return missing
