"""The change of a table with a key: delete every key of the batch, append the keys' new rows."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from cdc_assets.config.tables import DELETED_AT
from cdc_assets.lake.spark.sending import sent
from cdc_assets.lake.spark.sql import ticked
from cdc_assets.lake.values import as_lake, named, texts_of
from cdc_assets.materializer.actions.commit import Change, Merged, commit
from cdc_assets.materializer.actions.keys import (
    Bounds,
    bounds_from,
    bounds_in,
    bounds_of,
    of_frame,
    of_keys,
    within,
)
from cdc_assets.materializer.fold import JSON, fold, parsed, text_struct
from cdc_assets.materializer.winners import Winners, winners
from cdc_assets.postgres.key_lookup import Key

# Changes of a batch whose rows are large, since it is too large for ``winners`` with so few.
_FEW = 20_000


def merge_keyed(change: Change) -> Merged:
    """Delete the rows of every key of the batch, append the row that each key has by its end."""
    lake, facts = change.lake, change.facts
    texts, key = texts_of(lake), [c.source.name for c in lake.key]
    keeps = lake.row.mode == "soft_delete"
    if not keeps and (won := winners(change.batch, facts, key, texts)) is not None:
        return _merge_winners(change, won)
    if not keeps and not facts.unchanged and facts.rows <= _FEW:
        return _merge_few(change)
    with ExitStack() as cleanup:
        folded = fold(
            change.session, change.events, facts, key, texts, keep_deleted=keeps
        ).persist()
        cleanup.callback(folded.unpersist)
        counts = folded.agg(
            F.count_if(F.col("op") == "U"),
            F.count_if(F.col("op") == "D"),
            F.count_if(F.col("unknown").isNotNull()),
            *bounds_of(lake),
        ).collect()[0]
        upserts, deletes, partial = int(counts[0]), int(counts[1]), int(counts[2])
        live = "unknown is null" if keeps else "unknown is null and op = 'U'"
        new = as_lake(folded.where(live), lake.columns, "row", "gone")
        missing = list[Key]()
        if partial:
            left_out = [n for n in texts if n in facts.unchanged or (keeps and n not in key)]
            rows = folded.where("unknown is not null")
            filled, missing = _filled(change, rows, left_out, cleanup)
            new = new.unionByName(filled)
        new = new.select(*_columns(change))
        delete = change.emptying
        if delete is None and lake.has_rows(change.state):
            delete = of_frame(lake, folded, bounds_from(lake, counts[3:]))
        has_rows = upserts or (keeps and deletes)
        again = _reread(change, missing)
        commit(change, delete=delete, new=new if has_rows else None, again=again)
        return Merged(upserts, deletes, len(missing))


def _merge_winners(change: Change, won: Winners) -> Merged:
    session, lake, state = change.session, change.lake, change.state
    delete, new, missing = change.emptying, None, list[Key]()
    if delete is None and lake.has_rows(state):
        fewer = len(won.earlier) < len(won.keys) and change.inserts_add()
        keys = won.earlier if fewer else won.keys
        if len(keys):
            delete = of_keys(lake, keys, lambda: sent(session, keys))
    if len(won.rows):
        new = as_lake(sent(session, won.rows), lake.columns, "row")
    if len(won.partial):
        rows, missing = _completed(change, won.partial)
        new = rows if new is None else new.unionByName(rows)
    if new is not None:
        new = new.select(*_columns(change))
    commit(change, delete=delete, new=new, again=_reread(change, missing))
    return Merged(won.upserted, won.deleted, len(missing))


def _merge_few(change: Change) -> Merged:
    """A batch of few changes, all with whole rows: no row is sorted, grouped or kept in memory.

    Each of these would copy it. The rows are read twice instead: first for their keys alone.
    """
    session, lake, facts = change.session, change.lake, change.facts
    key = [c.source.name for c in lake.key]
    events = change.events
    if facts.truncate is not None:
        events = events.where(F.col("off") > facts.truncate)
    last = (
        events.select("off", "op", F.from_json("data", text_struct(key), JSON).alias("key"))
        .groupBy("key")
        .agg(F.max("off").alias("off"), F.max_by("op", "off").alias("op"))
        .toArrow()
    )
    keys, stay = last.select(["key"]), last.filter(pc.not_equal(last["op"], "D")).select(["off"])
    delete, new = change.emptying, None
    if delete is None and lake.has_rows(change.state) and len(keys):
        delete = of_keys(lake, keys, lambda: sent(session, keys))
    if len(stay):
        if len(stay) < facts.rows:
            events = events.join(F.broadcast(sent(session, stay)), "off", "left_semi")
        texts = texts_of(lake)
        new = as_lake(parsed(events, texts), lake.columns, "row").select(*named(lake.columns))
    commit(change, delete=delete, new=new)
    return Merged(len(stay), len(keys) - len(stay))


def _completed(change: Change, partial: pa.Table) -> tuple[DataFrame, list[Key]]:
    """:func:`_filled` of ``winners.Winners.partial``; what is found is looked for first."""
    session, lake, key = change.session, change.lake, [c.source.name for c in change.lake.key]
    rows = sent(session, partial).withColumn("gone", F.lit(None).cast("bigint"))
    bounds = bounds_in(lake, partial["source"])
    names = sorted({name for some in partial["unknown"].to_pylist() for name in some})
    keys = _in_table(change, rows, [], bounds).select("of").distinct().collect()
    found = {tuple(row["of"]) for row in keys}
    missing = [
        values
        for one in partial["key"].to_pylist()
        if (values := tuple(one[name] for name in key)) not in found
    ]
    whole = _with_old(change, rows, names, bounds).dropDuplicates(["key"]).drop("key", "gone")
    return whole, missing


def _filled(
    change: Change, partial: DataFrame, left_out: Sequence[str], cleanup: ExitStack
) -> tuple[DataFrame, list[Key]]:
    """Complete rows that lack columns, from the table's row under the source key.

    Returns the typed rows, and the keys of those that have to be read again from the source.
    """
    # A table whose copy was resumed on another snapshot may have a row twice until the row's first
    # change is applied: this one. Either will do (invariant 8): later changes settle differences.
    found = _with_old(change, partial, left_out, {}).dropDuplicates(["key"]).persist()
    cleanup.callback(found.unpersist)
    missing = [
        tuple(row[0])
        # A deleted row that the table doesn't have needs no values.
        for row in partial.where("op = 'U'")
        .select("key")
        .join(found.select("key"), "key", "left_anti")
        .collect()
    ]
    return found.drop("key"), missing


def _with_old(
    change: Change, partial: DataFrame, left_out: Sequence[str], bounds: Bounds
) -> DataFrame:
    """The rows of ``partial`` that the table has, with its values of ``left_out``."""
    lake = change.lake
    typed = as_lake(partial, lake.columns, "row", "unknown", "key", "gone")
    old = _in_table(change, partial, left_out, bounds)
    places = {name: f"old_{i}" for i, name in enumerate(left_out)}
    joined = typed.join(old, typed["key"] == old["of"], "inner")
    return joined.select(
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


def _in_table(
    change: Change, partial: DataFrame, left_out: Sequence[str], bounds: Bounds
) -> DataFrame:
    """The table's rows under the source keys: whose key they are ``of``, and ``old_…``.

    If the table is mixed, another row may have the old key of a row whose key changed; its own,
    too, if it had another one meanwhile.
    """
    session, lake = change.session, change.lake
    sure = partial.where("not moved") if change.mixed else partial
    by_source = as_lake(
        sure.select("source", F.col("key").alias("of")), lake.key, "source", "of"
    ).toDF(*(f"s{i}" for i in range(len(lake.key))), "of")
    called = {c.source.name: c.name for c in lake.columns}
    target = session.table(lake.sql_name).alias("t")
    if bounds:
        target = target.where(within(bounds))
    target = target.select(
        *(F.col(ticked(c.name)).alias(f"t{i}") for i, c in enumerate(lake.key)),
        *(F.col(ticked(called[name])).alias(f"old_{i}") for i, name in enumerate(left_out)),
    )
    condition = F.col("s0") == F.col("t0")
    for i in range(1, len(lake.key)):
        condition = condition & (F.col(f"s{i}") == F.col(f"t{i}"))
    return F.broadcast(by_source).join(target, condition, "inner")


def _reread(change: Change, missing: Sequence[Key]) -> Generator[DataFrame]:
    """The rows of the ``missing`` keys, as the source has them now: the table's, in pieces."""
    if not missing:
        return
    session, lake = change.session, change.lake
    for piece in change.reread(missing):
        if piece.found:
            data = pa.array((row for _, row in piece.found), pa.string())
            piece.found.clear()  # it may be large, and isn't needed while it is written
            again = parsed(sent(session, pa.table({"data": data})), texts_of(lake))
            rows = as_lake(again, lake.columns, "row", read_later=True)
            del data, again
            gone = F.lit(None).cast("bigint").alias("gone")
            yield rows.select("*", gone).select(*_columns(change))


def _columns(change: Change) -> list[Column]:
    """The table's columns, of :func:`as_lake` and the time ``gone``."""
    lake = change.lake
    marked = [F.timestamp_micros("gone").alias(DELETED_AT)]
    return [*named(lake.columns), *(marked if lake.row.mode == "soft_delete" else [])]
