"""A key and a watermark that no constraint keeps, as of a view: whether they hold now."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import LiteralString

import psycopg
from psycopg import sql

from cdc_assets.config.tables import TableConfig
from cdc_assets.errors import first_line
from cdc_assets.messages.findings import Finding
from cdc_assets.postgres.names import quoted
from cdc_assets.postgres.session.connect import Connection

# Each of the questions may read all rows; only a person who waits has them asked.
_SECONDS = 20
_NULL = "select exists (select from {rows} t where {null})"
_TWICE = (
    "select exists (select from {rows} t group by {columns} having pg_catalog.count(*) > 1 limit 1)"
)


def unkept(source: Connection, table: TableConfig, watermark: str) -> Iterator[Finding]:
    """Findings about rows without a key, or a watermark, and keys of several rows."""
    key = ", ".join(map(quoted, table.key))
    try:
        if _found(source, table, _NULL, [watermark]):
            yield Finding(
                "watermark",
                "error",
                f"{table.name}: its watermark {watermark} is NULL in a row, which is never found.",
                "Have the view show a time there, as by coalesce, or choose another column.",
            )
        if _found(source, table, _NULL, table.key):
            yield Finding(
                "key_null",
                "error",
                f"{table.name}: a row has NULL in its key ({key}), by which rows are told apart.",
                "Name other columns in key:, or leave such rows out of the view.",
            )
        elif _found(source, table, _TWICE, table.key):
            yield Finding(
                "key_not_unique",
                "error",
                f"{table.name}: several rows have the same key ({key}): the lake would have one of"
                " them.",
                "Name more columns in key:, so that each row has its own.",
            )
    except psycopg.Error as error:
        if source.closed:
            raise
        yield Finding(
            "key_unproven",
            "warning",
            f"{table.name}: no constraint keeps its key ({key}), and whether its rows do couldn't"
            f" be found out: {first_line(error)}.",
            f"See that no two rows have the same one, and none has NULL: {_SECONDS} s are given.",
        )


def _found(
    source: Connection, table: TableConfig, query: LiteralString, names: Sequence[str]
) -> bool:
    columns = [sql.Identifier("t", name) for name in names]
    null = sql.SQL(" or ").join(sql.SQL("{} is null").format(column) for column in columns)
    with source.transaction():
        source.execute(
            sql.SQL(
                "select pg_catalog.set_config('statement_timeout', {}, true),"
                " pg_catalog.set_config('transaction_read_only', 'on', true)"
            ).format(sql.Literal(f"{_SECONDS}s"))
        )
        asked = sql.SQL(query).format(
            rows=table.rows, null=null, columns=sql.SQL(", ").join(columns)
        )
        row = source.execute(asked).fetchone()
    return bool(row and row[0])
