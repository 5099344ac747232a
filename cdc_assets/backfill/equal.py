"""Rows that the lake has as they were read: nothing has to be written of them.

They are looked for in some snapshot of the lake table, without its writer lock. What is equal there
is right once the log is applied up to where the package's rule holds, too: the rule says that
nothing but changes which the reader saw came in between, and the last of these left the row as it
was read. A change that left values out kept those of the snapshot, which are equal; or it took
another key's, and then its key is read again (``apply.Done.partial``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import and_

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyiceberg.table import Table
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from cdc_assets.config.tables import DELETED_AT
from cdc_assets.lake.lineage import count, said
from cdc_assets.lake.spark.sending import sent
from cdc_assets.lake.spark.sql import ticked
from cdc_assets.lake.tables import LakeTable
from cdc_assets.lake.values import as_lake, same_in_lake, texts_of
from cdc_assets.materializer.actions.keys import bounds_in, has_bounds, within
from cdc_assets.materializer.fold import parsed
from cdc_assets.postgres.key_lookup import Key
from cdc_assets.verify.rows import as_of

# Of a statement, which carries the rows along: a Connect server takes 128 MiB.
_STATEMENT_BYTES = 100 * 10**6
# Of a table of which each statement reads all, in times the rows' bytes. Else for one of 1 TB it
# would be read some 20,000 times.
_READ_AT_MOST = 50


def equal(
    session: SparkSession,
    lake: LakeTable,
    compared: Table,
    rows: pa.Array,
    keys: Sequence[Key],
) -> npt.NDArray[np.bool_]:
    """Of each of ``rows``, as ``apply.Looked`` has them, whether ``compared`` has it, and once.

    None is found where that would read far more than the rows are: they are all written then.
    Raises TableProblem if the lake table lacks a column, errors of Spark.
    """
    found = np.zeros(len(rows), np.bool_)
    snapshot = compared.current_snapshot()
    if snapshot is None or not len(rows) or rows.nbytes > _STATEMENT_BYTES:
        return found
    size = count(said(snapshot), "total-files-size")
    if not has_bounds(lake) and size > _READ_AT_MOST * rows.nbytes:
        return found
    table = pa.table({"place": pa.array(range(len(rows)), pa.int64()), "data": rows})
    mine = as_lake(
        parsed(sent(session, table), texts_of(lake), "place"), lake.columns, "row", "place"
    )
    there = as_of(session, lake, snapshot.snapshot_id).rows.alias("t")
    if bounds := bounds_in(lake, _structs(lake, keys)):
        there = there.where(within(bounds))
    live = F.col(f"t.{DELETED_AT}").isNull() if DELETED_AT in lake.extra else F.lit(True)
    there = there.select(
        *(F.col(f"t.{ticked(c.name)}").alias(f"t{i}") for i, c in enumerate(lake.columns)),
        live.alias("live"),
    )
    named = [lake.columns.index(column) for column in lake.key]
    joined = there.join(
        F.broadcast(mine), reduce(and_, (F.col(f"c{i}") == F.col(f"t{i}") for i in named))
    )
    same = [
        F.expr(same_in_lake(column, f"c{i}")).eqNullSafe(F.expr(same_in_lake(column, f"t{i}")))
        for i, column in enumerate(lake.columns)
    ]
    met = joined.select("place", reduce(and_, same, F.col("live")).alias("same")).toArrow()
    places = met["place"].to_numpy()
    found[places] = met["same"].to_numpy()
    found &= np.bincount(places, minlength=len(rows)) == 1
    return found


def _structs(lake: LakeTable, keys: Sequence[Key]) -> pa.ChunkedArray:
    columns = [pa.array(texts, pa.string()) for texts in zip(*keys, strict=True)]
    fields = [pa.field(column.source.name, pa.string()) for column in lake.key]
    return pa.chunked_array([pa.StructArray.from_arrays(columns, fields=fields)])
