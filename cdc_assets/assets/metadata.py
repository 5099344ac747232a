"""What the UI shows of a table: the standard metadata of Dagster, made from the engine's values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dagster as dg

from cdc_assets.assets.names import TableAssets
from cdc_assets.log.progress import ChunkProgress
from cdc_assets.materializer.drain import Drained
from cdc_assets.spark.tables import LakeTable

# Carried on by the heartbeats of a quiet table: nothing of it has changed since.
STANDING = ("dagster/column_schema", "dagster/column_lineage", "dagster/row_count", "dagster/uri")


def definition_metadata(names: TableAssets) -> dict[str, Any]:
    """Of the lake asset's definition: what is known before the table exists."""
    location = f"{names.config.warehouse}/{names.config.namespace}"
    return {
        "dagster/table_name": names.lake_table_name,
        "dagster/uri": f"{location}/{names.config.lake_name(names.table)}",
        "source table": str(names.table),
    }


def column_schema(lake: LakeTable) -> dg.TableSchema:
    """The lake table's columns; the Postgres type is each column's description."""
    key = {column.name for column in lake.key}
    return dg.TableSchema(
        columns=[
            dg.TableColumn(
                column.name,
                column.mapping.lake,
                description=column.source.type,
                constraints=dg.TableColumnConstraints(
                    nullable=not column.source.not_null,
                    unique=key == {column.name},
                    other=["primary key"] if column.name in key else [],
                ),
            )
            for column in lake.columns
        ]
    )


def column_lineage(lake: LakeTable, names: TableAssets) -> dg.TableColumnLineage:
    """Each column comes from the source's column of that name."""
    return dg.TableColumnLineage(
        {
            column.name: [dg.TableColumnDep(asset_key=names.source, column_name=column.source.name)]
            for column in lake.columns
        }
    )


def table_metadata(lake: LakeTable, names: TableAssets, rows: int | None) -> dict[str, Any]:
    """Of a materialization: schema, lineage, row count and where the table is."""
    found: dict[str, Any] = {
        "dagster/column_schema": column_schema(lake),
        "dagster/column_lineage": column_lineage(lake, names),
    }
    if rows is not None:
        found["dagster/row_count"] = rows
    table = lake.load()
    if table is not None:
        found["dagster/uri"] = str(table.location())
    return found


def drained_metadata(drained: Drained, lag_seconds: float | None) -> dict[str, Any]:
    """Of a materialization: what the merges since the last one did."""
    found: dict[str, Any] = {
        "changes": drained.changes,
        "upserts": drained.upserted,
        "deletes": drained.deleted,
        "repaired": drained.repaired,
        "merges": drained.merges,
        "merge seconds": round(drained.seconds, 3),
        "applied LSN": str(drained.cursor.applied_lsn),
        "files waiting": drained.pending_entries,
    }
    if lag_seconds is not None:
        found["lag seconds"] = round(lag_seconds, 3)
    return found


def chunk_metadata(chunk: ChunkProgress) -> dict[str, Any]:
    """Of a partition of the copy; a chunk whose cost wasn't recorded says nothing of it."""
    found: Mapping[str, Any] = {
        "dagster/partition_row_count": chunk.rows,
        "rows": chunk.rows,
        "bytes": chunk.bytes,
        "seconds": None if chunk.seconds is None else round(chunk.seconds, 3),
    }
    return {key: value for key, value in found.items() if value is not None}
