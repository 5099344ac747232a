"""The change of a table with a key: delete every key of the batch, append the keys' new rows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from cdc_assets.config.tables import DELETED_AT
from cdc_assets.lake.tables import ticked
from cdc_assets.lake.values import as_lake, named, texts_of
from cdc_assets.materializer.actions.commit import Change, Merged, commit
from cdc_assets.materializer.actions.keys import bounds_from, bounds_of, of_frame, of_keys
from cdc_assets.materializer.fold import fold, parsed
from cdc_assets.materializer.winners import Winners, winners
from cdc_assets.postgres.names import lake_column


def merge_keyed(change: Change) -> Merged:
    """Delete the rows of every key of the batch, append the row that each key has by its end."""
    lake, facts = change.lake, change.facts
    texts, key = texts_of(lake), [c.source.name for c in lake.key]
    keeps = lake.row.mode == "soft_delete"
    if not keeps and (won := winners(change.batch, facts, key, texts)) is not None:
        return _merge_winners(change, won)
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
        repaired = 0
        if partial:
            left_out = [n for n in texts if n in facts.unchanged or (keeps and n not in key)]
            rows = folded.where("unknown is not null")
            filled, repaired = _filled(change, rows, left_out, cleanup)
            new = new.unionByName(filled)
        marked = F.timestamp_micros("gone").alias(DELETED_AT)
        new = new.select(*named(lake.columns), *([marked] if keeps else []))
        delete = change.emptying
        if delete is None and lake.has_rows(change.state):
            delete = of_frame(lake, folded, bounds_from(lake, counts[3:]))
        commit(change, delete=delete, new=new if upserts or (keeps and deletes) else None)
        return Merged(upserts, deletes, repaired)


def _merge_winners(change: Change, won: Winners) -> Merged:
    session, lake, state = change.session, change.lake, change.state
    delete, new = change.emptying, None
    if delete is None and not (won.inserts and change.inserts_add()) and lake.has_rows(state):
        delete = of_keys(lake, won.keys, lambda: session.createDataFrame(won.keys))
    if len(won.rows):
        new = as_lake(session.createDataFrame(won.rows), lake.columns, "row")
        new = new.select(*named(lake.columns))
    commit(change, delete=delete, new=new)
    return Merged(len(won.rows), won.deleted)


def _filled(
    change: Change, partial: DataFrame, left_out: Sequence[str], cleanup: ExitStack
) -> tuple[DataFrame, int]:
    """Complete rows that lack columns: from the table's row under the source key, else reread.

    If the table is mixed, another row may have the old key of a row whose key changed.
    Returns the typed rows, and how many had to be read again from the source.
    """
    session, lake = change.session, change.lake
    typed = as_lake(partial, lake.columns, "row", "unknown", "source", "key", "gone")
    sure = partial.where("source = key") if change.mixed else partial
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
    again = session.createDataFrame([(text,) for text in change.reread(missing)], "data string")
    read = as_lake(parsed(again, texts_of(lake)), lake.columns, "row", read_later=True)
    return rows.unionByName(read, allowMissingColumns=True), len(missing)
