"""The layout of a lake table's rows: its partitions and its order, as configured.

Both may be changed for a table that exists: Iceberg keeps files of several partition specs side by
side, so that is a change of metadata; compaction moves the older files over. The layout applied
last is a property of the table, so that nothing is compared with a column's former name, and a
change made by hand stays until the configuration changes.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.transforms import VoidTransform, parse_transform
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from cdc_assets.config.layout import PROPERTY, Order, Part, described, parse_order, parse_part
from cdc_assets.errors import TableProblem, first_line
from cdc_assets.lake.spark.sql import listed, ticked
from cdc_assets.lake.tables import LakeTable


def is_arranged(lake: LakeTable, loaded: Table) -> bool:
    """Whether the layout applied last is as configured. No record and no partitions: no layout."""
    wanted = described(lake.table.partition_by, lake.table.sort_by)
    known = loaded.properties.get(PROPERTY)
    if known is None and loaded.spec().is_unpartitioned():
        known = described((), ())
    return known == wanted


def arrange(session: SparkSession, lake: LakeTable, loaded: Table) -> None:
    """Give the table, as it was ``loaded``, the partitions and the order that are configured.

    The caller holds the table's writer lock. Each statement is a commit of its own; the next writer
    finishes what a dead one left. Raises TableProblem, having changed nothing, if a column isn't
    there or Iceberg refuses its transform.
    """
    if is_arranged(lake, loaded):
        return
    parts = [parse_part(text) for text in lake.table.partition_by]
    orders = [parse_order(text) for text in lake.table.sort_by]
    types = {field.name: field.field_type for field in loaded.schema().fields}
    for key, columns in (
        ("partition_by", [part.column for part in parts]),
        ("sort_by", [part.column for part in orders]),
    ):
        if missing := [column for column in columns if column not in types]:
            raise TableProblem(
                lake.row.table,
                f"{key} names a column {missing[0]}, which its lake table doesn't have",
                f"Correct {key} (its columns are {', '.join(sorted(types))}). Its log waits.",
            )
    for part in parts:
        if not parse_transform(part.transform).can_transform(types[part.column]):
            raise TableProblem(
                lake.row.table,
                f"partition_by has {part.sql}, and column {part.column} is {types[part.column]}",
                "Take another transform or column. Its log waits.",
            )
    statements = partition_changes(loaded.spec(), loaded.schema(), parts)
    if orders or not loaded.sort_order().is_unsorted:
        statements += order_changes(orders, partitioned=bool(parts))
    applied = {PROPERTY: described(lake.table.partition_by, lake.table.sort_by)}
    statements.append(f"set tblproperties ({listed(applied)})")
    for statement in statements:
        try:
            session.sql(f"alter table {lake.sql_name} {statement}")
        except PySparkException as error:
            raise TableProblem(
                lake.row.table,
                f"its lake table can't be laid out as configured: {first_line(error)}",
                "Correct partition_by and sort_by. Its log waits.",
            ) from error


def partition_changes(spec: PartitionSpec, schema: Schema, wanted: Sequence[Part]) -> list[str]:
    """The clauses that turn ``spec`` into ``wanted``, to follow ``alter table t``."""
    has: dict[Part, str] = {}
    for field in spec.fields:
        if not isinstance(field.transform, VoidTransform):
            column = schema.find_column_name(field.source_id)
            has[Part(column or "", str(field.transform))] = field.name
    # Drops come first: a day beside an hour of the same column would be refused.
    return [
        *(
            f"drop partition field {ticked(name)}"
            for part, name in has.items()
            if part not in wanted
        ),
        *(f"add partition field {part.sql}" for part in wanted if part not in has),
    ]


def order_changes(wanted: Sequence[Order], *, partitioned: bool) -> list[str]:
    """The clauses that order rows within a file; a merge doesn't shuffle its rows for that."""
    if not wanted:
        return ["write unordered", "unset tblproperties if exists ('write.distribution-mode')"]
    order = "locally ordered by " + ", ".join(part.sql for part in wanted)
    return [f"write distributed by partition {order}" if partitioned else f"write {order}"]
