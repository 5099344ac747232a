"""The source's comments as the lake table's own: a table property, and docs of its columns.

So every reader of the catalog finds them, the UI included. They change metadata only, without a
snapshot; the caller of ``annotate`` holds the table's writer lock (invariant 9).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyiceberg.schema import Schema
from pyspark.sql import SparkSession

from cdc_assets.lake.spark.sql import listed, quoted, ticked
from cdc_assets.lake.tables import LakeColumn, LakeTable
from cdc_assets.postgres.comments import Comments

# The name that Iceberg's engines agree on.
PROPERTY = "comment"


def annotate(session: SparkSession, lake: LakeTable, told: Comments) -> bool:
    """Copy the source's comments to the lake table; returns whether anything had to change."""
    loaded = lake.load()
    if loaded is None:
        return False
    changes = statements(loaded.schema(), loaded.properties, lake.columns, told)
    for statement in changes:
        session.sql(f"alter table {lake.sql_name} {statement}")
    return bool(changes)


def statements(
    schema: Schema,
    properties: Mapping[str, str],
    columns: Sequence[LakeColumn],
    told: Comments,
) -> list[str]:
    """The clauses still needed, to follow ``alter table t``; one commit a statement."""
    docs = {field.name: field.doc or "" for field in schema.fields}
    changed = [
        f"{ticked(column.name)} comment {quoted(said)}"
        for column in columns
        if column.name in docs
        and docs[column.name] != (said := told.columns.get(column.source.number, ""))
    ]
    found = [f"alter column {', '.join(changed)}"] if changed else []
    if told.table and properties.get(PROPERTY) != told.table:
        found.append(f"set tblproperties ({listed({PROPERTY: told.table})})")
    elif not told.table and PROPERTY in properties:
        found.append(f"unset tblproperties ({quoted(PROPERTY)})")
    return found
