"""Whether an Iceberg table that somebody else made can be kept current as it is.

Pure, but for reading delete manifests. Nothing is altered to make it fit: whoever made it may still
read or write it as it is.
"""

from __future__ import annotations

from collections.abc import Iterator

from pyiceberg.manifest import DataFileContent, ManifestContent
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.transforms import VoidTransform
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    StringType,
    TimestampType,
    TimestamptzType,
)

from cdc_assets.config.layout import Part, parse_part
from cdc_assets.lake.tables import COPYING, SOURCE, TABLE, LakeTable

_SPARK: dict[type[IcebergType], str] = {
    BooleanType: "boolean",
    IntegerType: "int",
    LongType: "bigint",
    FloatType: "float",
    DoubleType: "double",
    StringType: "string",
    BinaryType: "binary",
    DateType: "date",
    TimestampType: "timestamp_ntz",
    TimestamptzType: "timestamp",
}


def spark_type(found: IcebergType) -> str:
    """An Iceberg type as ``postgres.types`` calls it; others keep Iceberg's own name."""
    if isinstance(found, DecimalType):
        return f"decimal({found.precision},{found.scale})"
    if isinstance(found, ListType):
        return f"array<{spark_type(found.element_type)}>"
    return _SPARK.get(type(found), str(found))


def misfits(lake: LakeTable, loaded: Table) -> Iterator[str]:
    """What is in the way of keeping the table current; each with what to do."""
    if lake.row.mode != "mirror":
        yield f"mode is {lake.row.mode}, and only a mirror can be adopted: set mode: mirror"
    made_for = loaded.properties.get(SOURCE), loaded.properties.get(TABLE)
    if made_for not in ((None, None), (lake.config.name, str(lake.row.table))):
        yield f"it is the table {made_for[1]} of source {made_for[0]}: give another name (as:)"
    if COPYING in loaded.properties:
        yield "a copy of it was never completed: have it copied, without adopt"
    if loaded.properties.get("gc.enabled", "true").lower() == "false":
        yield (
            "its files may be another table's, too (gc.enabled is false), and care deletes files:"
            " have all of them rewritten where it was made, and unset gc.enabled"
        )
    yield from _columns(lake, loaded.schema())
    yield from _partitions(lake, loaded.spec(), loaded.schema())
    if has_equality_deletes(loaded):
        yield (
            "it has equality deletes, which our merges can't apply: rewrite its data files where it"
            " was made (rewrite_data_files with delete-file-threshold 1)"
        )


def _columns(lake: LakeTable, schema: Schema) -> Iterator[str]:
    wanted = {column.name: column.mapping.lake for column in lake.columns} | dict(lake.extra)
    key = {column.name for column in lake.key}
    found = {field.name: field for field in schema.fields}
    for name, kind in wanted.items():
        what = f"{'key column' if name in key else 'column'} {name}"
        if (field := found.get(name)) is None:
            near = next((other for other in found if other.lower() == name.lower()), None)
            other = f" (it has {near}: columns.rename)" if near is not None else ""
            yield f"it lacks the {what}{other}: add it as {kind}, or leave it out (columns.exclude)"
        elif (has := spark_type(field.field_type)) != kind:
            text = f", or columns.types: {{{name}: string}}" if has == "string" else ""
            yield f"the {what} is {has}, and has to be {kind}: alter it{text}"
        elif field.required and name not in key:
            yield f"the {what} takes no NULL: alter column {name} drop not null"
    for name in found.keys() - wanted.keys():
        yield (
            f"it has a column {name}, which the source lacks and each change of a row would empty:"
            f" drop it, or name its column of the source (columns.rename)"
        )


def _partitions(lake: LakeTable, spec: PartitionSpec, schema: Schema) -> Iterator[str]:
    has = {
        Part(schema.find_column_name(field.source_id) or "", str(field.transform))
        for field in spec.fields
        if not isinstance(field.transform, VoidTransform)
    }
    if has != {parse_part(text) for text in lake.table.partition_by}:
        said = ", ".join(sorted(f'"{part.sql}"'.replace("`", "") for part in has))
        yield f"it is partitioned otherwise than configured: set partition_by: [{said}]"


def has_equality_deletes(loaded: Table) -> bool:
    """Whether its current snapshot has any; reads the delete manifests alone."""
    current = loaded.current_snapshot()
    return current is not None and any(
        entry.data_file.content == DataFileContent.EQUALITY_DELETES
        for manifest in current.manifests(loaded.io)
        if manifest.content == ManifestContent.DELETES
        for entry in manifest.fetch_manifest_entry(loaded.io, discard_deleted=True)
    )
