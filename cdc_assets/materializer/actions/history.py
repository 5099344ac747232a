"""Mode append: every change becomes a row, with its operation and its time.

A row has the values after the change; a deleted row has its key only (with REPLICA IDENTITY FULL
and no key, all columns), a truncate has no values. An update that left columns out (unchanged
TOAST) gets their values from the change before it (invariant 8): in the batch, else from the newest
row of its key in the lake, else from the source. A key's newest row is the one with the greatest
``_lsn`` among those with an ``_xid``; the copied row has no ``_xid``, and is older than all.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, repeat

import pyarrow as pa
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql import types as T

from cdc_assets.lake.spark.sending import repeated, sent
from cdc_assets.lake.spark.sql import ticked
from cdc_assets.lake.tables import LakeTable
from cdc_assets.lake.values import as_lake, named, texts_of
from cdc_assets.log.staged.files import OLD_KEY
from cdc_assets.materializer.actions.commit import Change, Merged, commit
from cdc_assets.materializer.fold import JSON, Event, parsed, relinked_keys, text_struct
from cdc_assets.postgres.key_lookup import Key

_META = ("off", "op", "lsn", "ts", "xid")


def append_history(change: Change) -> Merged:
    """Append a row for each change of the batch, whose events are of WHOLE_SCHEMA."""
    with ExitStack() as cleanup:
        rows, lacking = _rows(change, cleanup)
        commit(change, new=rows, again=lacking.rows(change) if lacking else None)
    return Merged(change.facts.rows, 0, len(lacking.keys) if lacking else 0)


def _rows(change: Change, cleanup: ExitStack) -> tuple[DataFrame, Lacking | None]:
    """The rows of the batch for the lake, and those that lack values of the source's.

    ``cleanup`` frees the frames that Spark keeps of them: nothing else ever would.
    """
    lake, events, facts = change.lake, change.events, change.facts
    texts, key = texts_of(lake), [c.source.name for c in lake.key]
    left_out = [name for name in texts if name in facts.unchanged]
    if not left_out or not key:
        row = F.from_json("data", text_struct(texts), JSON).alias("row")
        whole = as_lake(events.select(row, *_META), lake.columns, "row", *_META)
        return _labelled(whole, lake), None
    filled = _from_batch(change, key, texts, left_out).persist()
    cleanup.callback(filled.unpersist)
    whole = as_lake(filled.where("source is null"), lake.columns, "row", *_META)
    partial = filled.where("source is not null")
    if partial.isEmpty():
        return _labelled(whole, lake), None
    rows, lacking = _from_lake(change, partial, left_out, cleanup)
    return _labelled(whole.unionByName(rows), lake), lacking


def _labelled(rows: DataFrame, lake: LakeTable) -> DataFrame:
    return rows.select(
        *named(lake.columns),
        F.col("op").alias("_op"),
        F.col("lsn").alias("_lsn"),
        F.timestamp_micros("ts").alias("_ts"),
        F.col("xid").alias("_xid"),
    )


def _from_batch(
    change: Change, key: Sequence[str], names: Sequence[str], left_out: Sequence[str]
) -> DataFrame:
    """Columns ``_META``, ``row``, and for rows that still lack values ``source`` and ``unknown``.

    ``source`` is the key of the row that has the missing values: the lake's, or the source's of one
    that ``came`` into the row filter.
    """
    session, facts = change.session, change.facts
    keyed = change.events.withColumn("key", F.from_json("data", text_struct(key), JSON))
    odd = relinked_keys(session, facts, key)
    simple = _running(keyed.join(odd, "key", "left_anti"), names, left_out)
    if not facts.relinked:
        return simple
    rows = keyed.join(odd, "key", "left_semi").select(*_META, "unchanged", "data").collect()
    meta = {row.off: tuple(row[name] for name in _META) for row in rows}
    linked = linked_values([Event(r.off, r.op, r.unchanged, r.data) for r in rows], key)
    schema = T.StructType(
        [
            *(T.StructField(n, T.StringType() if n == "op" else T.LongType()) for n in _META),
            T.StructField("source", text_struct(key)),
            T.StructField("unknown", T.ArrayType(T.StringType())),
            T.StructField("came", T.BooleanType()),
            T.StructField("data", T.StringType()),
        ]
    )
    made = []
    for off, values, source in linked:
        unknown = [n for n in left_out if n not in values] if source is not None else []
        asked = tuple(source) if source is not None and unknown else None
        came = isinstance(source, Came)
        made.append((*meta[off], asked, unknown or None, came, json.dumps(values)))
    row = F.from_json("data", text_struct(names), JSON).alias("row")
    return simple.unionByName(
        repeated(session, made, schema).select(*_META, "source", "unknown", "came", row)
    )


def _running(keyed: DataFrame, names: Sequence[str], left_out: Sequence[str]) -> DataFrame:
    """Every change; the columns that it left out come from an earlier change of its key."""
    before = Window.partitionBy("key").orderBy("off").rowsBetween(Window.unboundedPreceding, 0)
    wide = keyed.withColumn("row", F.from_json("data", text_struct(names), JSON)).withColumn(
        "missing", F.coalesce(F.from_json("unchanged", "array<string>"), F.array())
    )
    change = F.col("op").isin("I", "U")
    known = {
        name: F.last(
            F.when(
                change & ~F.array_contains("missing", name),
                F.struct(F.col("row").getField(name).alias("value")),
            ),
            ignorenulls=True,
        ).over(before)
        for name in left_out
    }
    wide = wide.withColumns({f"known_{i}": known[name] for i, name in enumerate(left_out)})
    places = {name: f"known_{i}" for i, name in enumerate(left_out)}
    unknown = F.filter(
        F.array(*(F.when(F.col(places[name]).isNull(), F.lit(name)) for name in left_out)),
        lambda name: name.isNotNull(),
    )
    lacks = change & (F.size(unknown) > 0)
    return wide.select(
        *_META,
        F.when(lacks, F.col("key")).alias("source"),
        F.when(lacks, unknown).alias("unknown"),
        F.lit(False).alias("came"),
        F.struct(
            *(
                (
                    F.when(change, F.col(places[name]).getField("value")).otherwise(
                        F.col("row").getField(name)
                    )
                    if name in places
                    else F.col("row").getField(name)
                ).alias(name)
                for name in names
            )
        ).alias("row"),
    )


class Came(tuple[str | None, ...]):
    """The key of a row that a key change brought into the row filter: only the source has it."""

    __slots__ = ()


def linked_values(
    events: Iterable[Event], key: Sequence[str]
) -> list[tuple[int, dict[str, str | None], Key | None]]:
    """Every change of some keys: its offset, its known values, the key of the row for more.

    That row is the lake's; or the source's, of a Came. ``events`` hold every change of every key
    that they mention. Pure.
    """
    state: dict[Key, tuple[dict[str, str | None], Key | None]] = {}
    gone: dict[Key, tuple[dict[str, str | None], Key | None]] = {}
    found: list[tuple[int, dict[str, str | None], Key | None]] = []
    came: dict[Key, list[int]] = {}  # places in found, by the key that the row has by now
    for event in sorted(events, key=lambda e: e.off):
        values: dict[str, str | None] = json.loads(event.data)
        old = values.pop(OLD_KEY, None)
        at = tuple(values[name] for name in key)
        if event.op == "D":
            # A key change that follows needs the values once more.
            gone[at] = state.pop(at, ({}, at))
            found.append((event.off, values, None))
            continue
        source: Key | None = None
        if event.unchanged is not None:
            came_from = at
            if old is not None:
                names: dict[str, str | None] = json.loads(old)
                came_from = tuple(names[name] for name in key)
                before = gone.pop(came_from, ({}, came_from))
            else:
                before = state.get(at, ({}, at))
            values, source = before[0] | values, before[1]
            if source is not None and None in source:  # no row of the lake has it
                came[at] = [*came.pop(came_from, ()), len(found)]
        state[at] = (values, source)
        found.append((event.off, values, source))
    for now, places in came.items():
        for place in places:
            found[place] = (*found[place][:2], Came(now))
    return found


@dataclass(frozen=True, slots=True)
class Lacking:
    """Rows, typed, whose values ``unknown`` the lake lacks: those of the keys ``source``.

    ``keys``: all of these, each once.
    """

    partial: DataFrame
    left_out: Sequence[str]
    keys: Sequence[Key]

    def rows(self, change: Change) -> Generator[DataFrame]:
        """The rows with the values that the source has now, in pieces; NULL where it has no row."""
        session, lake = change.session, change.lake
        number = {name: f"c{i}" for i, name in enumerate(texts_of(lake))}
        for piece in change.reread(self.keys):
            places = [*(place for place, _ in piece.found), *piece.gone]
            data = chain((row for _, row in piece.found), repeat(None, len(piece.gone)))
            columns = zip(*(self.keys[place] for place in places), strict=True)
            key = pa.StructArray.from_arrays(
                [pa.array(texts, pa.string()) for texts in columns],
                names=[c.source.name for c in lake.key],
            )
            again = sent(session, pa.table({"of": key, "data": pa.array(data, pa.string())}))
            piece.found.clear()  # it may be large, and isn't needed while it is written
            read = as_lake(
                parsed(again, texts_of(lake), "of"), lake.columns, "row", "of", read_later=True
            )
            del again
            old = read.select(
                "of", *(F.col(number[n]).alias(f"old_{i}") for i, n in enumerate(self.left_out))
            )
            joined = self.partial.join(old, F.col("source") == F.col("of"))
            yield _labelled(_completed(joined, self.left_out, lake), lake)


def _from_lake(
    change: Change, partial: DataFrame, left_out: Sequence[str], cleanup: ExitStack
) -> tuple[DataFrame, Lacking | None]:
    """The rows of ``partial`` with the lake's values in the columns ``unknown``, and the others."""
    session, lake = change.session, change.lake
    keys = [f"s{i}" for i in range(len(lake.key))]
    called = {c.source.name: c.name for c in lake.columns}
    by_source = as_lake(
        partial.where("not came").select("source").distinct().withColumn("of", F.col("source")),
        lake.key,
        "source",
        "of",
    ).toDF(*keys, "of")
    old = [f"old_{i}" for i in range(len(left_out))]
    target = (
        session.table(lake.sql_name)
        .where("_op in ('I', 'U')")
        .select(
            *(F.col(ticked(c.name)).alias(f"t{i}") for i, c in enumerate(lake.key)),
            *(
                F.col(ticked(called[name])).alias(place)
                for name, place in zip(left_out, old, strict=True)
            ),
            F.struct(F.col("_xid").isNotNull().alias("x"), F.col("_lsn")).alias("age"),
        )
    )
    condition = F.lit(True)
    for i, name in enumerate(keys):
        condition = condition & (F.col(name) == F.col(f"t{i}"))
    newest = (
        F.broadcast(by_source)
        .join(target, condition)
        .groupBy("of")
        .agg(F.max_by(F.struct(*old), "age").alias("old"))
        .select("of", F.lit(False).alias("of_came"), "old.*")
    ).persist()
    cleanup.callback(newest.unpersist)
    rows = as_lake(partial, lake.columns, "row", *_META, "source", "unknown", "came")
    wanted = by_source.select("of", F.lit(False).alias("of_came")).join(newest, "of", "left_anti")
    wanted = wanted.unionByName(
        partial.where("came").select(F.col("source").alias("of"), F.col("came").alias("of_came"))
    ).distinct()
    lacking = list({tuple(row[0]): None for row in wanted.collect()})
    same = (F.col("source") == F.col("of")) & (F.col("came") == F.col("of_came"))
    if not lacking:
        return _completed(rows.join(newest, same, "left"), left_out, lake), None
    rest = rows.join(F.broadcast(wanted), same, "left_semi")
    rows = rows.join(F.broadcast(wanted), same, "left_anti").join(newest, same, "left")
    return _completed(rows, left_out, lake), Lacking(rest, left_out, lacking)


def _completed(joined: DataFrame, left_out: Sequence[str], lake: LakeTable) -> DataFrame:
    """Rows beside the values ``old_…`` of what they left out."""
    places = {name: f"old_{i}" for i, name in enumerate(left_out)}
    return joined.select(
        *(
            (
                F.when(F.array_contains("unknown", name), F.col(places[name]))
                .otherwise(F.col(f"c{i}"))
                .alias(f"c{i}")
                if name in places
                else F.col(f"c{i}")
            )
            for i, name in enumerate(texts_of(lake))
        ),
        *_META,
    )
