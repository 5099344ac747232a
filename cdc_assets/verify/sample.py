"""Comparing some rows of a table with the source at one LSN, at a bounded cost, again and again.

Each run takes the next part of the table, so that a full round of runs has compared all of it:

- *What the source has*: the rows of some neighbouring pages (a TID range scan), every column, are
  compared with what the lake has of their keys. That finds rows which the lake lacks, has twice, or
  has with other values.
- *What only the lake has*: keys of the lake, those whose hash lies in a window, are looked up in
  the source by its index.

No one predicate serves both sides. A hash of the key is a full scan of the source. A range of keys
uses the index, but has an unknown number of rows, and the order of texts is a collation's, which
the lake doesn't have. Pages have neither problem, but they can't show what only the lake has; hence
the second half, which reads nothing but an index. The lake's side is one scan of its key's columns,
and of the files that may have the sampled keys.

Nothing waits for it (``point``): the source is read under an exported snapshot, the lake as of one
of its own, and what the lake changed between the two is left out. A table that is truncated or
altered meanwhile isn't compared this time.

In a table without a key, the rows of the pages have to be in the lake at least as often; if the
sample is the whole table, equally often.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from datetime import datetime

from psycopg import sql
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from cdc_assets.errors import TableProblem, first_line
from cdc_assets.lake.spark.sql import ticked
from cdc_assets.lake.tables import LakeTable
from cdc_assets.log.verified import compared, remember_compared, remember_missed, version
from cdc_assets.maintenance.lost_care import surviving
from cdc_assets.materializer.reread import column_names
from cdc_assets.pins.holders import under
from cdc_assets.pins.row_filter import row_filter
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.catalog import check_oid
from cdc_assets.postgres.ctid import CtidRange
from cdc_assets.postgres.key_lookup import key_columns, lookups
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.publication.row_filters import filtered
from cdc_assets.readiness.foreign_errors import explained
from cdc_assets.verify.difference import SHOWN_KEYS, balance
from cdc_assets.verify.key_names import key_names
from cdc_assets.verify.point import (
    READ_AGAIN,
    Texts,
    await_lake,
    await_log,
    moment,
    moved,
    offset_of,
    still,
    whole_at,
)
from cdc_assets.verify.rows import (
    Beside,
    as_key,
    as_of,
    comparable,
    lake_expressions,
    lake_side,
    loses,
    shapes,
    source_side,
)
from cdc_assets.verify.source import REWRITTEN, Part, read_source

# How long a comparison waits for transactions that hold up the slot, and for a flusher or merges
# that aren't level. After that the table is compared another time.
PATIENCE_SECONDS = 20.0
# No column of Postgres has a name of more than 63 bytes.
_KEY = "key" + "_" * 64
_HASHES = 1_000_000
# Lake types by whose bounds files without the sampled keys are skipped; each is read from text.
_BOUNDED = (
    T.IntegerType,
    T.LongType,
    T.DecimalType,
    T.DateType,
    T.TimestampType,
    T.TimestampNTZType,
    T.StringType,
)
# A table with more merges than this before it isn't compared: that would be a catch-up.
_BEHIND = 4


@dataclass(frozen=True, slots=True)
class Sampled:
    """The result of comparing a part of a table.

    The part is a ``share`` of the table, from 0 to 1, from ``begin`` on; ``rows`` of the source
    were compared, and ``looked_up`` keys of the lake looked up. ``keys`` and ``columns`` name some
    that differ. ``moved`` keys changed meanwhile and weren't compared. ``skipped``: why nothing was
    compared, ``since`` when; since no time if that is as it should be. ``round_ended``: when the
    last full round ended. ``differed_at``: when rows differed last, unless all of the table was
    found equal since.
    """

    table: TableId
    lsn: Lsn | None
    begin: float
    share: float = 0.0
    rows: int = 0
    looked_up: int = 0
    differing: int = 0
    keys: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    moved: int = 0
    skipped: str | None = None
    since: datetime | None = None
    round_ended: datetime | None = None
    differed_at: datetime | None = None


def sample(pipeline: Pipeline, session: SparkSession, table: TableId, sample_rows: int) -> Sampled:
    """Compare the next part of ``table``, about ``sample_rows`` rows from either side."""
    store = pipeline.store
    now = store.server_now()
    if pipeline.config.table(table).freshness.quiet_seconds(now):
        known = compared(store, table)  # what differs then is what isn't merged
        said = "in its quiet times nothing is merged, so that it isn't level with the source"
        return Sampled(table, None, known.next_share, skipped=said)
    begin, copy = compared(store, table).next_share, store.copy_state(table)
    epoch, seen = copy.epoch if copy is not None else None, version(store, table)
    try:
        with surviving(store, table, "the comparison of a sample of it"):
            found = _compare(pipeline, session, table, sample_rows, begin)
    except Exception as problem:  # noqa: BLE001 - one table's, told; the others go on
        since = remember_missed(store, table)
        said = first_line(explained(problem, pipeline.config))
        found = Sampled(table, None, begin, skipped=said, since=since)
    else:
        end = found.begin + found.share
        differs = epoch if found.differing else None
        saw, next_share = (seen if found.begin == 0 else None), 0.0 if end >= 1 else end
        remember_compared(store, table, next_share, saw=saw, differs=differs)
    progress = compared(store, table)
    return replace(
        found,
        round_ended=progress.round_ended,
        differed_at=progress.differed_at if progress.differed_epoch == epoch else None,
    )


def _compare(
    pipeline: Pipeline, session: SparkSession, table: TableId, sample_rows: int, begin: float
) -> Sampled:
    store = pipeline.store
    offset = offset_of(comparable(pipeline, table).state())
    behind = next((b.bytes for b in store.backlogs() if b.table == table), 0)
    if behind > _BEHIND * pipeline.config.lake.merge_bytes:
        raise TableProblem(table, "its log is far behind", "It is compared once that is applied.")
    before = shapes(pipeline, [table])[table]
    with ExitStack() as cleanup:
        point, snapshot_name = cleanup.enter_context(
            moment(pipeline, "sample", round(PATIENCE_SECONDS))
        )
        await_log(store, table, point, PATIENCE_SECONDS)
        lake, state = await_lake(pipeline, session, table, point, PATIENCE_SECONDS)
        if not whole_at(store, lake, point):
            raise TableProblem(table, READ_AGAIN, "It is compared the next time.")
        beside = as_of(session, lake, state.snapshot_id)
        gone = moved(store, beside, point, offset, state)
        share = min(1.0, sample_rows / max(1, state.total_rows))
        texts = read_source(
            pipeline, session, beside, snapshot_name, lambda found: _pages(found, begin, share)
        ).persist()
        cleanup.callback(texts.unpersist)
        texts.count()
        if shapes(pipeline, [table])[table] != before:
            raise TableProblem(table, REWRITTEN)
        read = still(source_side(texts, beside), beside, gone)
        whole = not lake.key and share == 1
        some = None if whole else _of_keys(read, texts, beside)
        theirs = still(lake_side(beside, some), beside, gone)
        name = key_names(store, lake)
        found = balance(read, theirs, lake, name, at_least=not lake.key and not whole)
        keys = _window(beside, begin, share, sample_rows, gone) if lake.key else {}
        surplus = _surplus(pipeline, snapshot_name, lake, keys)
        return Sampled(
            table,
            point,
            begin,
            share,
            found.source_rows,
            len(keys),
            found.differing + len(surplus),
            (*found.keys, *(f"{name(key)} (only in the lake)" for key in surplus))[:SHOWN_KEYS],
            found.columns,
            len(gone),
        )


def _pages(found: Sequence[Part], begin: float, share: float) -> Iterator[tuple[Part, CtidRange]]:
    """The pages from ``begin`` on, of all parts one after the other; at least one.

    A sample begins where the last one ended, so a round reads each page once.
    """
    total = sum(part.pages for part in found)
    first = min(math.ceil(begin * total), max(0, total - 1))
    end = max(first + 1, math.ceil((begin + share) * total))
    for part in found:
        low, high = max(0, first), min(part.pages, end)
        if low < high:
            yield part, CtidRange(low, high)
        first, end = first - part.pages, end - part.pages


def _of_keys(read: DataFrame, texts: DataFrame, beside: Beside) -> DataFrame:
    """The lake's rows that have one of the keys of ``read``."""
    rows, lake = beside.rows, beside.lake
    column, kind = beside.columns[beside.told_apart[0] if lake.key else 0]
    if lake.key and isinstance(kind, _BOUNDED):
        text = f"try_cast(t{column.source.number} as {kind.simpleString()})"
        low, high = texts.agg(
            *(F.expr(f"cast({f}({text}) as string)") for f in ("min", "max"))
        ).collect()[0]
        if low is not None:
            ends = [F.lit(end).cast(kind) for end in (low, high)]
            value = F.col(ticked(column.name))
            rows = rows.where(value.between(*ends) | value.isNull())
    key = as_key(lake, {i: F.expr(text) for i, text in enumerate(lake_expressions(beside))})
    wanted = F.broadcast(read.select(F.col("key").alias(_KEY)))
    return rows.withColumn(_KEY, key).join(wanted, _KEY, "left_semi").drop(_KEY)


def _window(
    beside: Beside, begin: float, share: float, sample_rows: int, gone: frozenset[Texts]
) -> dict[str, tuple[str, ...]]:
    """By key, the texts of its columns, for the lake's keys whose hash lies in the window."""
    lake = beside.lake
    if any(c.is_key and c.policy == "clamp" and loses(c, kind) for c, kind in beside.columns):
        return {}  # the lake has other keys than the source, and says so elsewhere
    place = F.pmod(F.xxhash64(*(F.col(ticked(c.name)) for c in lake.key)), F.lit(_HASHES))
    first, end = round(begin * _HASHES), round((begin + share) * _HASHES)
    some = beside.rows.where((place >= first) & (place < end))
    numbers = [lake.columns.index(column) for column in lake.key]
    found = (
        still(lake_side(beside, some), beside, gone)
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
        check_oid(source, lake.row.table, lake.row.oid)
        columns = key_columns(source, lake.row.oid, [c.source.number for c in lake.key])
        if any(c.source.number not in columns for c in lake.key):
            raise TableProblem(lake.row.table, REWRITTEN)
        key = [columns[column.source.number] for column in lake.key]
        query = sql.SQL("select k.n from {} where not exists (select from {} t where {})")
        where = row_filter(source, pipeline.config, lake.row)
        now = column_names(source, lake)
        rows = filtered(lake.table.rows, where, [now[c.source.number] for c in lake.key])
        for some in lookups(key, [keys[each] for each in listed]):
            found = source.execute(query.format(some.listed, rows, some.equal))
            missing += [listed[some.first + int(n) - 1] for (n,) in found]
    return missing
