"""The statements that give an Iceberg table its next columns."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pyiceberg.schema import Schema

from cdc_assets.config.tables import METADATA_COLUMNS
from cdc_assets.lake.spark.sql import ticked
from cdc_assets.lake.tables import LakeColumn, LakeTable
from cdc_assets.materializer.schema.columns import Refused

# Spark's names of types and Iceberg's, where they differ.
_ICEBERG = {"bigint": "long", "timestamp_ntz": "timestamp", "timestamp": "timestamptz"}
_WIDER = {("int", "long"), ("float", "double")}
_DECIMAL = re.compile(r"\Adecimal\((\d+), ?(\d+)\)\Z")


def alterations(after: LakeTable, schema: Schema, fields: Mapping[int, int]) -> list[str]:
    """The remaining alterations, each to follow ``alter table t``. Raises Refused."""
    name_of = {f.field_id: f.name for f in schema.fields}
    type_of = {f.field_id: str(f.field_type) for f in schema.fields}
    id_of = {name: field_id for field_id, name in name_of.items()}
    owned = set(fields.values())
    wanted: dict[int, LakeColumn] = {}
    added: list[LakeColumn] = []
    for column in after.columns:
        field_id = fields.get(column.source.number)
        if field_id is None and (there := id_of.get(column.name)) not in owned:
            # A dead writer added it. But metadata's column, even of earlier, has other values.
            field_id = there if column.name not in METADATA_COLUMNS else None
        if field_id is None:
            added.append(column)
        else:
            wanted[field_id] = column
    taken = {column.name for column in after.columns}
    if both := taken & set(after.extra):
        name = min(both)
        by = "metadata" if name in after.table.metadata else f"mode {after.row.mode}"
        raise Refused(
            f"it has a column {name}, which {by} adds",
            "Name it in columns.exclude, or give it another name by columns.rename"
            + (
                ", or take it out of metadata." if by == "metadata" else ", or choose another mode."
            ),
        )
    statements = []
    for field_id, name in list(name_of.items()):
        column_there = wanted.get(field_id)
        if name in taken and (column_there is None or column_there.name != name):
            aside = f"{name}__dropped_{field_id}" if column_there is None else f"cdc_{field_id}__"
            statements.append(f"rename column {ticked(name)} to {ticked(aside)}")
            name_of[field_id] = aside
    for field_id, column in wanted.items():
        if field_id not in name_of:
            raise Refused(f"its lake table has no column {column.name} any more")
        if name_of[field_id] != column.name:
            statements.append(f"rename column {ticked(name_of[field_id])} to {ticked(column.name)}")
        has, needs = type_of[field_id], _iceberg(column.mapping.lake)
        if needs is not None and _widens(has, needs):
            statements.append(f"alter column {ticked(column.name)} type {column.mapping.lake}")
        elif needs is not None and has != needs and not _widens(needs, has):
            raise Refused(f"column {column.name} is {has} in the lake and would have to be {needs}")
    statements += [f"add column {ticked(c.name)} {c.mapping.lake}" for c in added]
    return statements


def _iceberg(lake: str) -> str | None:
    """Iceberg's spelling of a Spark SQL type; None for arrays, which are never changed."""
    if match := _DECIMAL.match(lake):
        return f"decimal({match[1]}, {match[2]})"
    return None if lake.startswith("array<") else _ICEBERG.get(lake, lake)


def _widens(has: str, needs: str) -> bool:
    one, other = _DECIMAL.match(has), _DECIMAL.match(needs)
    if one and other:
        return one[2] == other[2] and int(one[1]) < int(other[1])
    return (has, needs) in _WIDER
