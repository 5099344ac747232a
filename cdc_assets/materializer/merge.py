"""One atomic change of a lake table: a folded batch, with the cursor it leads to.

Keeps invariant 7 and never writes equality deletes. On a branch (``lake.publish``): delete the
rows of every key of the batch (a MERGE with the keys broadcast, so the table is never shuffled),
append the new rows. Readers see one step, and each commit carries the cursor.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from operator import and_

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from cdc_assets.config.tables import DELETED_AT
from cdc_assets.lake.publish import append, published
from cdc_assets.lake.state import LakeState
from cdc_assets.lake.tables import LakeTable, ticked
from cdc_assets.lake.values import as_lake, named, names_of, same_in_lake, texts_of
from cdc_assets.log.batch import Facts
from cdc_assets.log.store import Cursor
from cdc_assets.materializer.append import history
from cdc_assets.materializer.fold import count_rows, fold, parsed
from cdc_assets.materializer.reread import Reread
from cdc_assets.postgres.names import lake_column

# A batch of 64 MB has at most some millions of keys; broadcasting them costs less than a shuffle of
# the table.
_KEYS = "cdc_keys"


@dataclass(frozen=True, slots=True)
class Merged:
    """The result of a merge: keys written, keys deleted, rows read again from the source."""

    upserted: int
    deleted: int
    repaired: int


def merge(
    session: SparkSession,
    lake: LakeTable,
    state: LakeState,
    events: DataFrame,
    facts: Facts,
    cursor: Cursor,
    reread: Reread,
    *,
    mixed: bool = False,
) -> Merged:
    """Apply ``events`` to the table so that its cursor becomes ``cursor``, in one step.

    ``state`` is the table's state that the batch was cut for. ``mixed``: the table's rows may be of
    several moments, the last of which is ``complete_lsn``. Errors of Spark and Iceberg are passed
    on; readers see no change then.
    """
    if lake.row.mode == "append":
        with ExitStack() as cleanup:
            rows, repaired = history(session, lake, events, facts, reread, cleanup)
            _commit(session, lake, state, cursor, truncate=False, delete=None, new=rows)
        return Merged(facts.rows, 0, repaired)
    if lake.row.mode == "soft_delete" and facts.truncate is not None:
        return _mark_all(session, lake, state, events, cursor)
    if lake.row.key_columns:
        return _merge_keyed(session, lake, state, events, facts, cursor, reread, mixed=mixed)
    return _merge_counted(session, lake, state, events, facts, cursor)


def _merge_keyed(
    session: SparkSession,
    lake: LakeTable,
    state: LakeState,
    events: DataFrame,
    facts: Facts,
    cursor: Cursor,
    reread: Reread,
    *,
    mixed: bool = False,
) -> Merged:
    texts, key = texts_of(lake), [c.source.name for c in lake.key]
    keeps = lake.row.mode == "soft_delete"
    with ExitStack() as cleanup:
        folded = fold(session, events, facts, key, texts, keep_deleted=keeps).persist()
        cleanup.callback(folded.unpersist)
        counts = folded.agg(
            F.count_if(F.col("op") == "U"),
            F.count_if(F.col("op") == "D"),
            F.count_if(F.col("unknown").isNotNull()),
        ).collect()[0]
        upserts, deletes, partial = int(counts[0]), int(counts[1]), int(counts[2])
        live = "unknown is null" if keeps else "unknown is null and op = 'U'"
        new = as_lake(folded.where(live), lake.columns, "row", "gone")
        repaired = 0
        if partial:
            left_out = [n for n in texts if n in facts.unchanged or (keeps and n not in key)]
            rows = folded.where("unknown is not null")
            filled, repaired = _filled(session, lake, rows, left_out, reread, cleanup, mixed=mixed)
            new = new.unionByName(filled)
        marked = F.timestamp_micros("gone").alias(DELETED_AT)
        new = new.select(*named(lake.columns), *([marked] if keeps else []))
        keys = None
        if facts.truncate is None and lake.has_rows(state):
            keys = as_lake(folded, lake.key, "key")
        condition = " and ".join(f"t.{ticked(c.name)} = s.c{i}" for i, c in enumerate(lake.key))
        _commit(
            session,
            lake,
            state,
            cursor,
            truncate=facts.truncate is not None,
            delete=(keys, condition) if keys is not None else None,
            new=new if upserts or (keeps and deletes) else None,
        )
        return Merged(upserts, deletes, repaired)


def _merge_counted(
    session: SparkSession,
    lake: LakeTable,
    state: LakeState,
    events: DataFrame,
    facts: Facts,
    cursor: Cursor,
) -> Merged:
    """A table without a key: remove as many equal rows as were deleted, add what was inserted.

    If some copies of a row were deleted, all are, and the remaining number is appended again. Rows
    are equal if they are the same in the lake (``values.same_in_lake``, ``LakeTable.telling``):
    rows that differ as text may be equal there.
    """
    rest, known = [f"c{i}" for i in range(len(lake.columns))], lake.telling()
    telling = {f"id{i}": (c, f"c{i}") for i, c in enumerate(lake.columns) if c in known}
    ids = ["id", *telling]
    # A constant column to group by: there may be no other.
    alike = [F.lit(0).alias("id")]
    alike += [F.expr(same_in_lake(c, value)).alias(name) for name, (c, value) in telling.items()]
    values = [F.first(column).alias(column) for column in rest]
    with ExitStack() as cleanup:
        texts = parsed(count_rows(events, facts), texts_of(lake), "net")
        typed = as_lake(texts, lake.columns, "row", "net")
        rows = typed.select("*", *alike).groupBy(*ids)
        counted = rows.agg(*values, F.sum("net").alias("net")).where("net != 0").persist()
        cleanup.callback(counted.unpersist)
        sums = counted.agg(
            F.coalesce(F.sum(F.when(F.col("net") > 0, F.col("net"))), F.lit(0)),
            F.coalesce(F.sum(F.when(F.col("net") < 0, -F.col("net"))), F.lit(0)),
        ).collect()[0]
        inserted, deleted = int(sums[0]), int(sums[1])
        new = counted.where("net > 0").select(*rest, "net")
        delete = None
        if deleted and facts.truncate is None:
            gone = counted.where("net < 0").select(
                *(F.col(name).alias(f"gone_{name}") for name in ids), "net"
            )
            target = session.table(lake.sql_name).select(*(ticked(n) for n in names_of(lake)))
            same = reduce(and_, (F.col(name).eqNullSafe(F.col(f"gone_{name}")) for name in ids))
            hit = target.toDF(*rest).select("*", *alike).join(F.broadcast(gone), same, "inner")
            left = (F.count("*") + F.col("net")).alias("left")
            kept = hit.groupBy(*ids, "net").agg(*values, left).where("left > 0")
            new = new.unionByName(kept.select(*rest, F.col("left").alias("net")))
            conditions = [
                f"{same_in_lake(c, f't.{ticked(c.name)}')} <=> s.gone_{name}"
                for name, (c, _) in telling.items()
            ]
            delete = gone.drop("net"), " and ".join(["s.gone_id = 0", *conditions])
        copies = new.withColumn("copy", F.explode(F.sequence(F.lit(1), F.col("net"))))
        _commit(
            session,
            lake,
            state,
            cursor,
            truncate=facts.truncate is not None,
            delete=delete,
            new=copies.select(*named(lake.columns)) if inserted or delete else None,
        )
        return Merged(inserted, deleted, 0)


def _commit(
    session: SparkSession,
    lake: LakeTable,
    state: LakeState,
    cursor: Cursor,
    *,
    truncate: bool,
    delete: tuple[DataFrame, str] | None,
    new: DataFrame | None,
) -> None:
    with published(session, lake, state) as branch:
        if truncate:
            session.sql(f"delete from {branch}")
        elif delete is not None:
            keys, condition = delete
            keys.createOrReplaceTempView(_KEYS)
            session.sql(
                f"merge into {branch} t using (select /*+ broadcast({_KEYS}) */ * from {_KEYS}) s"
                f" on {condition} when matched then delete"
            )
        # Even without rows: a delete of whole files or of nothing doesn't carry the cursor.
        rows = _whole(session, lake, new) if new is not None else None
        append(session, lake, state, branch, cursor, rows)


def _whole(session: SparkSession, lake: LakeTable, rows: DataFrame) -> DataFrame:
    """``rows`` with NULL in the lake's columns that the source has dropped."""
    loaded = lake.load()
    if loaded is None or {f.name for f in loaded.schema().fields} <= set(rows.columns):
        return rows
    return rows.to(session.table(lake.sql_name).schema)


def _mark_all(
    session: SparkSession, lake: LakeTable, state: LakeState, events: DataFrame, cursor: Cursor
) -> Merged:
    """Apply a truncate, a batch of its own here: every row not yet marked is marked deleted."""
    at = events.agg(F.max("ts")).collect()[0][0]
    marks = f"update {{}} set {DELETED_AT} = timestamp_micros({at}) where {DELETED_AT} is null"
    with published(session, lake, state) as branch:
        deleted = session.table(lake.sql_name).where(f"{DELETED_AT} is null").count()
        if deleted:
            session.sql(marks.format(branch))
        append(session, lake, state, branch, cursor)
    return Merged(0, deleted, 0)


def _filled(
    session: SparkSession,
    lake: LakeTable,
    partial: DataFrame,
    left_out: Sequence[str],
    reread: Reread,
    cleanup: ExitStack,
    *,
    mixed: bool = False,
) -> tuple[DataFrame, int]:
    """Complete rows that lack columns: from the table's row under the source key, else reread.

    If the table is ``mixed``, another row may have the old key of a row whose key changed.
    Returns the typed rows, and how many had to be read again from the source.
    """
    typed = as_lake(partial, lake.columns, "row", "unknown", "source", "key", "gone")
    sure = partial.where("source = key") if mixed else partial
    by_source = as_lake(
        sure.select("source", F.col("key").alias("of")), lake.key, "source", "of"
    ).toDF(*(f"s{i}" for i in range(len(lake.key))), "of")
    target = session.table(lake.sql_name).select(
        *(F.col(ticked(c.name)).alias(f"t{i}") for i, c in enumerate(lake.key)),
        *(F.col(ticked(lake_column(name))).alias(f"old_{i}") for i, name in enumerate(left_out)),
    )
    condition = F.col("s0") == F.col("t0")
    for i in range(1, len(lake.key)):
        condition = condition & (F.col(f"s{i}") == F.col(f"t{i}"))
    old = F.broadcast(by_source).join(target, condition, "inner")
    places = {name: f"old_{i}" for i, name in enumerate(left_out)}
    joined = typed.join(old, typed["key"] == old["of"], "inner")
    found = joined.select(
        "key",
        "gone",
        *(
            (
                F.when(F.array_contains("unknown", c.source.name), F.col(places[c.source.name]))
                .otherwise(F.col(f"c{i}"))
                .alias(f"c{i}")
                if c.source.name in places
                else F.col(f"c{i}")
            )
            for i, c in enumerate(lake.columns)
        ),
    )
    # A table whose copy was resumed on another snapshot may have a row twice until the row's first
    # change is applied: this one. Either will do (invariant 8): later changes settle differences.
    found = found.dropDuplicates(["key"]).persist()
    cleanup.callback(found.unpersist)
    rows = found.drop("key")
    missing = [
        tuple(row[0])
        # A deleted row that the table doesn't have needs no values.
        for row in partial.where("op = 'U'")
        .select("key")
        .join(found.select("key"), "key", "left_anti")
        .collect()
    ]
    if not missing:
        return rows, 0
    again = session.createDataFrame([(text,) for text in reread(missing)], "data string")
    read = as_lake(parsed(again, texts_of(lake)), lake.columns, "row", read_later=True)
    return rows.unionByName(read, allowMissingColumns=True), len(missing)
