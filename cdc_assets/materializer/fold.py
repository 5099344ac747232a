"""Folding a batch: from many changes to one for each key.

The last change of a key wins, column by column (invariant 8): an update that left a TOAST column
out doesn't have its value, which comes from an earlier change of the same batch if one has it, and
else from the table. Keys are compared in Postgres's text form: if a key's text changes, Postgres
sends a key change, even if both texts are equal as values (``1.0``, ``1.00``).

A key change that left columns out needs the row under its *old* key, which may itself have been
changed earlier in the batch. Those few keys are folded in order, one change after the other, by
:func:`fold_relinked`; everything else is folded by Spark.

Tables without a key are counted instead: a row is worth its inserts minus its deletes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from cdc_assets.lake.spark.sending import repeated
from cdc_assets.lake.values import member
from cdc_assets.log.batch import Facts
from cdc_assets.log.staged.files import OLD_KEY

# Fail on anything that isn't the JSON we wrote, and take values of any length: Postgres's are at
# most 1 GB, the parser's own limit is 20 MB.
JSON = {"mode": "FAILFAST", "maxStringLen": "2147483647"}

# One row a key: op is D or U; `row` has the values as text; `unknown` names the columns whose value
# is to be taken from the table's row `source` (None when everything is known), and `moved` tells
# whether the row had another key meanwhile, even if `source` is its own. Where deleted rows
# are kept, `gone` is the time of the delete in microseconds since 1970, and `row` has the last
# values; elsewhere a deleted row has no values.
_FOLDED = ("op", "key", "source", "moved", "unknown", "gone", "row")


def text_struct(names: Iterable[str]) -> T.StructType:
    """A struct of strings: the form in which a staged ``_data`` is read before it is cast."""
    return T.StructType([T.StructField(name, T.StringType()) for name in names])


def parsed(frame: DataFrame, columns: Iterable[str], *keep: str) -> DataFrame:
    """The column ``data`` as the struct ``row``; ``keep`` columns come along."""
    return frame.select(F.from_json("data", text_struct(columns), JSON).alias("row"), *keep)


def fold(
    session: SparkSession,
    events: DataFrame,
    facts: Facts,
    key: Sequence[str],
    columns: Sequence[str],
    *,
    keep_deleted: bool = False,
) -> DataFrame:
    """One row for each key of ``events`` (EVENT_SCHEMA), with the columns ``_FOLDED``.

    ``keep_deleted`` needs WHOLE_SCHEMA.
    """
    if facts.truncate is not None:
        events = events.where(F.col("off") > facts.truncate)
    keyed = events.withColumn("key", F.from_json("data", text_struct(key), JSON))
    folder = _fold_kept if keep_deleted else _fold_simple

    def simple(some: DataFrame) -> DataFrame:
        return folder(some, facts.unchanged, key, columns).withColumn("moved", F.lit(False))

    if not facts.relinked:
        return simple(keyed)
    struct, odd = text_struct(key), relinked_keys(session, facts, key)
    at = F.col("ts") if keep_deleted else F.lit(None).cast("bigint").alias("ts")
    rows = keyed.join(odd, "key", "left_semi").select("off", "op", "unchanged", "data", at)
    folded = fold_relinked(
        [Event(r.off, r.op, r.unchanged, r.data, r.ts) for r in rows.collect()], key
    )
    schema = T.StructType(
        [
            T.StructField("op", T.StringType()),
            T.StructField("key", struct),
            T.StructField("source", struct),
            T.StructField("moved", T.BooleanType()),
            T.StructField("unknown", T.ArrayType(T.StringType())),
            T.StructField("gone", T.LongType()),
            T.StructField("data", T.StringType()),
        ]
    )
    sequential = repeated(
        session,
        [
            (
                *(f.op, f.key, f.source, f.moved, _unknown(f, key, columns, keep_deleted), f.gone),
                _data(f, key),
            )
            for f in folded
        ],
        schema,
    ).withColumn("row", F.from_json("data", text_struct(columns), JSON))
    others = simple(keyed.join(odd, "key", "left_anti"))
    return others.unionByName(sequential.select(*_FOLDED))


def relinked_keys(session: SparkSession, facts: Facts, key: Sequence[str]) -> DataFrame:
    """A column ``key`` with the keys that :func:`fold_relinked` folds, to be broadcast."""
    found = [(tuple(dict(named)[name] for name in key),) for named in facts.relinked]
    schema = T.StructType([T.StructField("key", text_struct(key))])
    return F.broadcast(repeated(session, found, schema))


def _fold_simple(
    keyed: DataFrame, unchanged: frozenset[str], key: Sequence[str], columns: Sequence[str]
) -> DataFrame:
    struct = text_struct(columns)
    left_out = [name for name in columns if name in unchanged]
    last = F.max_by(F.struct("op", "data"), "off").alias("last")
    if not left_out:
        folded = keyed.groupBy("key").agg(last)
        return folded.select(
            F.when(F.col("last.op") == "D", "D").otherwise("U").alias("op"),
            "key",
            F.lit(None).cast(text_struct(key)).alias("source"),
            F.lit(None).cast("array<string>").alias("unknown"),
            F.lit(None).cast("bigint").alias("gone"),
            F.from_json("last.data", struct, JSON).alias("row"),
        )
    # For each column that some update left out: the last change that has it. A struct around the
    # value distinguishes a sent NULL from a value that wasn't sent.
    wide = keyed.withColumn("row", F.from_json("data", struct, JSON)).withColumn(
        "missing", F.coalesce(F.from_json("unchanged", "array<string>"), F.array())
    )
    known = [
        F.max_by(
            F.when(
                (F.col("op") != "D") & ~F.array_contains("missing", name),
                F.struct(member("row", name).alias("value")),
            ),
            F.when((F.col("op") != "D") & ~F.array_contains("missing", name), F.col("off")),
        ).alias(f"known_{position}")
        for position, name in enumerate(left_out)
    ]
    folded = wide.groupBy("key").agg(last, *known)
    unknown = F.filter(
        F.array(
            *(
                F.when(F.col(f"known_{position}").isNull(), F.lit(name))
                for position, name in enumerate(left_out)
            )
        ),
        lambda name: name.isNotNull(),
    )
    places = {name: f"known_{position}" for position, name in enumerate(left_out)}
    parsed = folded.withColumn("last_row", F.from_json("last.data", struct, JSON)).select(
        F.when(F.col("last.op") == "D", "D").otherwise("U").alias("op"),
        "key",
        unknown.alias("unknown"),
        F.struct(
            *(
                (
                    member(places[name], "value") if name in places else member("last_row", name)
                ).alias(name)
                for name in columns
            )
        ).alias("row"),
    )
    needs = (F.col("op") == "U") & (F.size("unknown") > 0)
    return parsed.select(
        "op",
        "key",
        F.when(needs, F.col("key")).alias("source"),
        F.when(needs, F.col("unknown")).alias("unknown"),
        F.lit(None).cast("bigint").alias("gone"),
        "row",
    )


def _fold_kept(
    keyed: DataFrame, unchanged: frozenset[str], key: Sequence[str], columns: Sequence[str]
) -> DataFrame:
    """As _fold_simple, but a deleted row keeps its last values: from the batch, else the table."""
    told = F.when(F.col("op") != "D", F.col("off"))
    rows = _fold_simple(keyed.where("op != 'D'"), unchanged, key, columns).withColumnRenamed(
        "key", "row_key"
    )
    last = keyed.groupBy("key").agg(
        F.max_by(F.struct("op", "ts", "data"), "off").alias("last"), F.max(told).alias("told")
    )
    rest = F.array(*(F.lit(name) for name in columns if name not in key))
    joined = last.join(rows, last["key"] == rows["row_key"], "left")
    dead, alone = F.col("last.op") == "D", F.col("told").isNull()
    return joined.select(
        F.when(dead, "D").otherwise("U").alias("op"),
        last["key"],
        F.when(alone, F.col("key")).otherwise(F.col("source")).alias("source"),
        F.when(alone, rest).otherwise(F.col("unknown")).alias("unknown"),
        F.when(dead, F.col("last.ts")).alias("gone"),
        F.when(alone, F.from_json("last.data", text_struct(columns), JSON))
        .otherwise(F.col("row"))
        .alias("row"),
    )


@dataclass(frozen=True, slots=True)
class Event:
    """One staged row with its log offset."""

    off: int
    op: str
    unchanged: str | None
    data: str
    ts: int | None = None


@dataclass(frozen=True, slots=True)
class Folded:
    """The result for one key: its values as text; the rest is in the table's row ``source``."""

    op: str
    key: tuple[str | None, ...]
    values: dict[str, str | None]
    source: tuple[str | None, ...] | None
    gone: int | None = None
    moved: bool = False
    """Whether the row had another key meanwhile."""


def _data(folded: Folded, key: Sequence[str]) -> str:
    return json.dumps(folded.values | dict(zip(key, folded.key, strict=True)))


def _unknown(
    folded: Folded, key: Sequence[str], columns: Sequence[str], keep_deleted: bool
) -> list[str] | None:
    if folded.source is None or (folded.op == "D" and not keep_deleted):
        return None
    return [name for name in columns if name not in folded.values and name not in key] or None


def fold_relinked(events: Iterable[Event], key: Sequence[str]) -> list[Folded]:
    """Fold the changes of some keys in order, following rows from key to key.

    ``events`` hold every change of every key that they mention. Pure; O(changes) time and memory.
    """
    state: dict[tuple[str | None, ...], Folded] = {}
    for event in sorted(events, key=lambda e: e.off):
        values: dict[str, str | None] = json.loads(event.data)
        old = values.pop(OLD_KEY, None)
        at = tuple(values[name] for name in key)
        if event.op == "D":
            before = state.get(at)
            # The values stay with the tombstone: the key change that follows may need them. Those
            # that it lacks can't be read again: what is under its own key has to do.
            state[at] = (
                Folded(
                    *("D", at, before.values, before.source, event.ts), moved=before.source != at
                )
                if before is not None and before.op != "D"
                else Folded("D", at, {}, at if before is None else None, event.ts)
            )
        elif event.unchanged is None:
            state[at] = Folded("U", at, values, None)
        else:
            came_from = at
            if old is not None:
                names: dict[str, str | None] = json.loads(old)
                came_from = tuple(names[name] for name in key)
            before = state.get(came_from, Folded("U", came_from, {}, came_from))
            moved = before.moved or came_from != at
            state[at] = Folded("U", at, before.values | values, before.source, moved=moved)
    return list(state.values())


def count_rows(events: DataFrame, facts: Facts) -> DataFrame:
    """For a table without a key: ``(data, net)``, each row's inserts minus its deletes, never 0."""
    if facts.truncate is not None:
        events = events.where(F.col("off") > facts.truncate)
    sign = F.when(F.col("op") == "D", -1).otherwise(1)
    return events.groupBy("data").agg(F.sum(sign).alias("net")).where("net != 0")
