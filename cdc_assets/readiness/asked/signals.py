"""The table ``backfills.signals`` of the source, whose rows ask for backfills.

Its columns are those of Debezium's signal tables, which may stay as they are: ``id``, ``type`` (or
``kind``) and ``data``. It is read, not streamed: a backfill doesn't depend on where in the stream
it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import psycopg
from psycopg import sql

from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import ConfigurationError, first_line
from cdc_assets.messages.findings import Finding
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.session.connect import Connection

# Rows that are read at a time, and characters of one's data: each tick reads all of them. And of
# its id and kind: an index of ours has the id.
MOST, _LONGEST, _NAME = 1_000, 100_000, 500
# How long that may take: Debezium leaves rows of its windows there, for ever.
_SECONDS = 5
_LIMIT = sql.SQL("select pg_catalog.set_config('statement_timeout', '{}s', true)").format(_SECONDS)

# Its kind, and those of its columns whose text no function but Postgres's own makes.
_SHAPE = """
select c.relkind::text,
       array(select a.attname::text
               from pg_catalog.pg_attribute a join pg_catalog.pg_type t on t.oid = a.atttypid
              where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
                and t.typtype = 'b' and t.typnamespace = 'pg_catalog'::regnamespace)
  from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
 where n.nspname = %s and c.relname = %s
"""
# Debezium writes rows of its own there, if it has the table, too.
_ROWS = """
select pg_catalog.left({id}::text, {name}), pg_catalog.left(coalesce({kind}::text, ''), {name}),
       pg_catalog.left({data}::text, {longest})
  from {table}
 where {id} is not null
   and coalesce({kind}::text, '') not in ('snapshot-window-open', 'snapshot-window-close')
 order by {table}.ctid limit {most}
"""


@dataclass(frozen=True, slots=True)
class Written:
    """A row: ``data`` is text, which may be anything. Of a long ``id``, its beginning."""

    id: str
    kind: str
    data: str | None


def written(connection: Connection, config: SourceConfig) -> list[Written]:
    """The rows of the source's table, as they were inserted, if it has one.

    Raises ConfigurationError if they can't be read.
    """
    if config.backfills.signals is None:
        return []
    table = TableId.parse(config.backfills.signals)
    query = _query(connection, table)
    try:
        with connection.transaction():
            connection.execute(_LIMIT)
            rows = connection.execute(query).fetchall()
    except psycopg.errors.QueryCanceled as error:
        raise ConfigurationError(
            f"{table} takes more than {_SECONDS} s to read: its signals aren't taken.",
            "Delete what was done, those that Debezium writes at each of its windows, too.",
        ) from error
    except (psycopg.errors.InsufficientPrivilege, psycopg.errors.LockNotAvailable) as error:
        raise ConfigurationError(
            f"the signals in {table} can't be read: {first_line(error)}.",
            "The role that reads the source needs USAGE of its schema, and SELECT.",
        ) from error
    if len(rows) > MOST:
        raise ConfigurationError(
            f"{table} has more than {MOST:,} rows: its signals aren't taken.",
            "Delete those that were done: their outcome stays in the coordination schema.",
        )
    return [Written(*row) for row in rows]


def _query(connection: Connection, table: TableId) -> sql.Composed:
    row = connection.execute(_SHAPE, (table.schema, table.name)).fetchone()
    if row is None or row[0] not in ("r", "p"):
        raise ConfigurationError(
            f"backfills.signals: the source has no table {table}.",
            f"Make it: create table {table} (id text primary key, type text, data text);",
        )
    columns = row[1]
    kind = "type" if "type" in columns else "kind"
    if lacking := [name for name in ("id", kind, "data") if name not in columns]:
        raise ConfigurationError(
            f"backfills.signals: {table} has no column {lacking[0].replace('kind', 'type')} of a"
            " type of Postgres's own."
        )
    return sql.SQL(_ROWS).format(
        id=sql.Identifier("id"),
        kind=sql.Identifier(kind),
        data=sql.Identifier("data"),
        table=table.identifier,
        longest=sql.Literal(_LONGEST),
        name=sql.Literal(_NAME),
        most=sql.Literal(MOST + 1),
    )


def signal_findings(connection: Connection, config: SourceConfig) -> Iterator[Finding]:
    """What keeps signals in the source from being taken."""
    try:
        written(connection, config)
    except ConfigurationError as problem:
        yield Finding("signals_unreadable", "warning", problem.what, problem.remedy)
