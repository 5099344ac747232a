"""What keeps the rows of ``markers.table`` from becoming marks (``flusher.decode.markers``)."""

from __future__ import annotations

from collections.abc import Iterator

from cdc_assets.config.source import SourceConfig
from cdc_assets.messages.findings import Finding
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.publication.contents import (
    listed_columns,
    published_tables,
    row_filters,
)
from cdc_assets.postgres.publication.statements import addition
from cdc_assets.postgres.session.connect import Connection

COLUMNS = ("marker", "name")
# Its oid and kind, the numbers of its columns, and whether this role may publish it.
_SHAPE = """
select c.oid::bigint, c.relkind::text, c.relpersistence::text,
       (select pg_catalog.jsonb_object_agg(a.attname::text, a.attnum)
          from pg_catalog.pg_attribute a
         where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped),
       pg_catalog.pg_has_role(c.relowner, 'USAGE') and not exists (
         select from pg_catalog.pg_publication p
          where p.pubname = %s and not pg_catalog.pg_has_role(p.pubowner, 'USAGE'))
  from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
 where n.nspname = %s and c.relname = %s
"""
_INSERTS = "select pubinsert from pg_catalog.pg_publication where pubname = %s"


def creation(table: TableId) -> str:
    """The statement that makes the table of markers."""
    return (
        f"create table if not exists {table} (marker uuid primary key default"
        " pg_catalog.gen_random_uuid(), name text not null)"
    )


def marker_findings(connection: Connection, config: SourceConfig) -> Iterator[Finding]:
    """Findings about the table of markers, if there is to be one."""
    if (table := config.markers.id) is None:
        return
    name = config.publication
    shape = connection.execute(_SHAPE, (name, table.schema, table.name)).fetchone()
    if shape is None:
        said = f"markers.table: the source has no table {table}."
        yield Finding("markers_missing", "warning", said, f"{creation(table)};")
        return
    oid, kind, persistence, numbers, able = shape
    if kind != "r" or persistence != "p" or (lacking := [c for c in COLUMNS if c not in numbers]):
        what = (
            "isn't an ordinary table"
            if kind != "r" or persistence != "p"
            else (f"has no column {lacking[0]}")
        )
        yield Finding(
            "markers_columns",
            "warning",
            f"markers.table: {table} {what}: its rows make no marks.",
            f"Make another one: {creation(table)};",
        )
        return
    published = published_tables(connection, name)
    add = f"{addition(connection, name, [table])};"
    if published is not None and table in published:
        listed = listed_columns(connection, name, [oid]).get(oid)
        unsent = listed is not None and any(numbers[column] not in listed for column in COLUMNS)
        row = connection.execute(_INSERTS, (name,)).fetchone()
        if unsent or oid in row_filters(connection, name, [oid]) or not (row and row[0]):
            yield Finding(
                "markers_unpublished",
                "warning",
                f"the publication {name} doesn't send each row of {table} whole: those that it"
                " withholds make no marks.",
                f"alter publication {name} drop table {table}; {add}",
            )
    elif able or published is None:
        said = f"the publication {name} lacks {table}; the flusher adds it when it starts."
        yield Finding("markers_unpublished", "info", said, "")
    else:
        yield Finding(
            "markers_unpublished",
            "warning",
            f"the publication {name} lacks {table}, and this role can't add it: its rows make no"
            " marks.",
            f"{add} -- as an owner of the table and of the publication",
        )
