"""A table's metadata for the UI: Dagster's standard keys, made from the engine's values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dagster as dg
import psycopg
from psycopg.conninfo import conninfo_to_dict

from cdc_assets.dagster.names import TableAssets
from cdc_assets.lake.comments import PROPERTY as COMMENT
from cdc_assets.lake.tables import LakeTable
from cdc_assets.log.copies.chunks import ChunkProgress
from cdc_assets.log.staged.places import staged_places
from cdc_assets.log.staged.storage import folder_name
from cdc_assets.materializer.drain import Drained
from cdc_assets.messages.texts import COLUMN_COMMENT, TABLE_COMMENT, bounded
from cdc_assets.postgres.comments import Described
from cdc_assets.postgres.names import quoted

# Dagster's name for it; assets downstream are built again when it changes.
DATA_VERSION_TAG = "dagster/data_version"
ROW_COUNT = "dagster/row_count"
# Heartbeats of an idle table repeat these: nothing of them has changed since.
STANDING = (
    *("dagster/column_schema", "dagster/column_lineage", ROW_COUNT, "dagster/uri"),
    COMMENT,
)


def without_zeros(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """For results of checks: 500 tables have several a day, and Dagster keeps each three times."""
    return {name: value for name, value in metadata.items() if value != 0}


def source_metadata(names: TableAssets) -> dict[str, Any]:
    """Of the source asset's definition. An embedded Postgres's address isn't known yet."""
    dsn = names.config.postgres.dsn
    uri = shown_address(dsn.get_secret_value()) if dsn is not None else None
    # With its database in front: Dagster takes assets of one table name for one table.
    database = (uri or "").rpartition("/")[2] or "postgres"
    return {
        "dagster/table_name": f"{quoted(database)}.{names.table}",
        **({"dagster/uri": uri} if uri else {}),
    }


def shown_address(dsn: str) -> str | None:
    """Hosts, ports and database of a DSN: no user, no password; None if it can't be read."""
    try:
        parts = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        return None
    hosts = str(parts.get("host", "localhost")).split(",")
    ports = str(parts.get("port", "5432")).split(",")
    if len(ports) < len(hosts):
        ports = ports[:1] * len(hosts)
    where = ",".join(f"{host}:{port or 5432}" for host, port in zip(hosts, ports, strict=False))
    shown = f"{where}/{parts.get('dbname', '')}"
    # A password with an @ or / that isn't escaped ends up in the host or the database.
    return None if "@" in shown else f"postgresql://{shown}"


# Every staged file has these, whatever its table.
_STAGED = {
    "_op": ("string", "I, U, D, or T for truncate"),
    "_lsn": ("bigint", "the change's LSN"),
    "_commit_lsn": ("bigint", "the LSN of its transaction's commit"),
    "_ts": ("timestamp", "when its transaction was committed"),
    "_xid": ("bigint", "its transaction"),
    "_unchanged_cols": ("string", "columns that Postgres left out: their old value stays"),
    "_data": ("string", "the row as a JSON object, values in Postgres's text form"),
}


def staged_metadata(names: TableAssets) -> dict[str, Any]:
    """Of the staged log's definition."""
    return {
        "dagster/uri": f"{staged_places(names.config)[0].uri}/{folder_name(names.table)}",
        "dagster/column_schema": dg.TableSchema(
            columns=[dg.TableColumn(name, *rest) for name, rest in _STAGED.items()]
        ),
    }


def described_metadata(found: Described, dsn: str) -> dict[str, Any]:
    """Of an observation of the source asset: the table as the source has it now."""
    keys = {column.name for column in found.columns if column.is_key}
    # Not dagster/column_schema: the UI shows an observation's only under names of its own.
    return {
        "columns": dg.TableSchema(
            columns=[
                dg.TableColumn(
                    column.name,
                    column.type,
                    description=bounded(column.comment or "", COLUMN_COMMENT) or None,
                    constraints=_constraints(column.name, keys, not_null=column.not_null),
                )
                for column in found.columns
            ]
        ),
        **({COMMENT: bounded(found.comment, TABLE_COMMENT)} if found.comment else {}),
        **({"rows, estimated": found.rows} if found.rows is not None else {}),
        **({"dagster/uri": uri} if (uri := shown_address(dsn)) else {}),
    }


def data_version(epoch: int, offset: int) -> str:
    """Which rows a lake table has: how much of the log is applied to which of its copies."""
    return f"{epoch}:{offset}"


def definition_metadata(names: TableAssets) -> dict[str, Any]:
    """Of the lake asset's definition: what is known before the table exists."""
    namespace, name = names.config.lake_identifier(names.table)
    return {
        "dagster/table_name": names.lake_table_name,
        "dagster/uri": f"{names.config.warehouse}/{namespace}/{name}",
        "source table": str(names.table),
    }


def column_schema(lake: LakeTable, docs: Mapping[str, str | None]) -> dg.TableSchema:
    """The lake table's columns, described by the table's own comments and the Postgres type."""
    key = {column.name for column in lake.key}
    return dg.TableSchema(
        columns=[
            dg.TableColumn(
                column.name,
                column.mapping.lake,
                description=(
                    f"{bounded(said, COLUMN_COMMENT)} ({column.source.type})"
                    if (said := docs.get(column.name))
                    else column.source.type
                ),
                constraints=_constraints(column.name, key, not_null=column.source.not_null),
            )
            for column in lake.columns
        ]
    )


def _constraints(name: str, key: set[str], *, not_null: bool) -> dg.TableColumnConstraints:
    return dg.TableColumnConstraints(
        nullable=not not_null,
        unique=key == {name},
        other=["primary key"] if name in key else [],
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
    table = lake.load()
    docs = {field.name: field.doc for field in table.schema().fields} if table is not None else {}
    found: dict[str, Any] = {
        "dagster/column_schema": column_schema(lake, docs),
        "dagster/column_lineage": column_lineage(lake, names),
    }
    if rows is not None:
        found[ROW_COUNT] = rows
    if table is not None:
        found["dagster/uri"] = str(table.location())
        if said := table.properties.get(COMMENT):
            found[COMMENT] = bounded(said, TABLE_COMMENT)
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
    """Of a partition of the copy; costs that weren't recorded are left out."""
    found: Mapping[str, Any] = {
        "dagster/partition_row_count": chunk.rows,
        "rows": chunk.rows,
        "bytes": chunk.bytes,
        "seconds": None if chunk.seconds is None else round(chunk.seconds, 3),
    }
    return {key: value for key, value in found.items() if value is not None}
