"""The change of a table without a key: as many equal rows as were deleted are removed."""

from __future__ import annotations

from contextlib import ExitStack
from functools import reduce
from operator import and_

from pyspark.sql import functions as F

from cdc_assets.lake.spark.sql import ticked
from cdc_assets.lake.values import as_lake, named, names_of, same_in_lake, texts_of
from cdc_assets.materializer.actions.commit import Change, Deletion, Merged, commit
from cdc_assets.materializer.fold import count_rows, parsed


def merge_counted(change: Change) -> Merged:
    """Remove as many equal rows as were deleted, append the rows that were inserted.

    If some copies of a row were deleted, all are, and the remaining number is appended again. Rows
    are equal if they are the same in the lake (``values.same_in_lake``, ``LakeTable.telling``):
    rows that differ as text may be equal there.
    """
    session, lake, facts = change.session, change.lake, change.facts
    rest, known = [f"c{i}" for i in range(len(lake.columns))], lake.telling()
    telling = {f"id{i}": (c, f"c{i}") for i, c in enumerate(lake.columns) if c in known}
    ids = ["id", *telling]
    # A constant column to group by: there may be no other.
    alike = [F.lit(0).alias("id")]
    alike += [F.expr(same_in_lake(c, value)).alias(name) for name, (c, value) in telling.items()]
    values = [F.first(column).alias(column) for column in rest]
    with ExitStack() as cleanup:
        texts = parsed(count_rows(change.events, facts), texts_of(lake), "net")
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
        delete = change.emptying
        if deleted and delete is None:
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
            delete = Deletion(" and ".join(["s.gone_id = 0", *conditions]), gone.drop("net"))
        copies = new.withColumn("copy", F.explode(F.sequence(F.lit(1), F.col("net"))))
        new = copies.select(*named(lake.columns))
        commit(change, delete=delete, new=new if inserted or deleted else None)
        return Merged(inserted, deleted)
