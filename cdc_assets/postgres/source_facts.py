"""What the source is now, beside what the log remembers of it: the questions, not the verdict.

Read-only, and cheap enough to be asked at the start of each session and while it goes on: a handful
of queries, however many tables there are. What a difference means is in ``restart_record``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, LiteralString

import psycopg
from psycopg import sql

from cdc_assets.log.store import LogStore
from cdc_assets.log.tables import TableRow
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.publications import COLUMN_LISTS, PublishedShape
from cdc_assets.postgres.replication import SlotStatus, slot_status, switch_point, system_identifier
from cdc_assets.postgres.restart_record import (
    Recorded,
    Review,
    SlotRestart,
    Source,
    TableNow,
    compare,
    compare_table,
)

Connection = psycopg.Connection[tuple[Any, ...]]


def recorded(store: LogStore) -> Recorded:
    """What the coordination database remembers of the source."""
    timeline, restart = store.meta("timeline"), store.meta("slot_restart_lsn")
    return Recorded(
        store.flushed_lsn(),
        store.meta("system_identifier"),
        int(timeline) if timeline else None,
        store.meta("database"),
        store.meta("publication"),
        SlotRestart.parse(restart) if restart else None,
    )


def look(
    connection: Connection, dsn: str, slot: SlotStatus | None, publication: str, known: Recorded
) -> Source:
    """What the source is now; ``dsn`` is for a timeline's history, if that has to be asked for."""
    row = connection.execute(
        "select pg_is_in_recovery(), case when pg_is_in_recovery() then pg_last_wal_replay_lsn()"
        " else pg_current_wal_insert_lsn() end::text, (select oid::text from pg_catalog.pg_database"
        " where datname = current_database()), current_database()::text,"
        " (select oid::text from pg_catalog.pg_publication where pubname = %s)",
        (publication,),
    ).fetchone()
    assert row is not None
    in_recovery, end, database, name, published = row
    timeline = 0
    if not in_recovery:
        # A WAL file's name begins with the timeline; the control file lags behind a promotion.
        found = connection.execute(
            "select substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8)"
        ).fetchone()
        timeline = int(str(found[0]), 16) if found else 0
    source = Source(
        in_recovery,
        system_identifier(connection),
        timeline,
        Lsn.parse(end or "0/0"),
        database,
        name,
        published,
        slot,
    )
    if (
        not in_recovery
        and known.timeline is not None
        and source.system == known.system
        and timeline > known.timeline
    ):
        return replace(source, left_at=switch_point(dsn, timeline, known.timeline))
    return source


def followed(store: LogStore) -> list[TableRow]:
    """The tables whose log has to be without a gap."""
    return [row for row in store.tables() if row.followed_since is not None]


_TABLES: LiteralString = """
with wanted as (
    select * from unnest(%(schemas)s::text[], %(names)s::text[], %(oids)s::oid[])
        w (schema_name, table_name, old)),
published as (
    select schemaname, tablename from pg_catalog.pg_publication_tables
     where pubname = %(publication)s)
select w.schema_name, w.table_name, c.oid, coalesce(c.relkind::text, ''),
       coalesce(c.relpersistence = 'p', true),
       (select format('%%I.%%I', o_n.nspname, o.relname) from pg_catalog.pg_class o
          join pg_catalog.pg_namespace o_n on o_n.oid = o.relnamespace where o.oid = w.old),
       exists (select from published q
                where q.schemaname = w.schema_name and q.tablename = w.table_name),
       (select 'entry ' || r.oid from pg_catalog.pg_publication_rel r
         where r.prpubid = p.oid and r.prrelid = w.old),
       coalesce(p.pubinsert and p.pubupdate and p.pubdelete and p.pubtruncate, true),
       coalesce(p.pubviaroot, true), {filtered}, {listed}
  from wanted w
  left join pg_catalog.pg_publication p on p.pubname = %(publication)s
  left join pg_catalog.pg_namespace n on n.nspname = w.schema_name
  left join pg_catalog.pg_class c on c.relnamespace = n.oid and c.relname = w.table_name
"""
_ENTRY: LiteralString = (
    "exists (select from pg_catalog.pg_publication_rel e where e.prpubid = p.oid"
    " and e.prrelid = w.old and e.{} is not null)"
)


def look_at_tables(
    connection: Connection, publication: str, rows: Sequence[TableRow]
) -> dict[TableId, TableNow]:
    """What the source has of the registered tables now: one query, however many there are."""
    lists = connection.info.server_version >= COLUMN_LISTS
    entry = sql.SQL(_ENTRY)
    none = sql.SQL("false")
    query = sql.SQL(_TABLES).format(
        filtered=entry.format(sql.Identifier("prqual")) if lists else none,
        listed=entry.format(sql.Identifier("prattrs")) if lists else none,
    )
    found = connection.execute(
        query,
        {
            "schemas": [row.table.schema for row in rows],
            "names": [row.table.name for row in rows],
            "oids": [row.oid for row in rows],
            "publication": publication,
        },
    ).fetchall()
    return {
        TableId(schema, name): TableNow(
            int(oid) if oid is not None else None,
            kind,
            logged,
            renamed,
            published,
            published_as,
            PublishedShape(*shape),
        )
        for schema, name, oid, kind, logged, renamed, published, published_as, *shape in found
    }


def review(
    connection: Connection, dsn: str, store: LogStore, slot: str, publication: str
) -> tuple[Review, Source]:
    """Compare everything; changes nothing.

    A flusher may be at work: slot, log and end of WAL are asked for in the order in which none of
    them may overtake the next.
    """
    stands = slot_status(connection, slot)
    known = recorded(store)
    source = look(connection, dsn, stands, publication, known)
    findings = tuple(compare(known, source, slot, publication))
    rows = followed(store)
    if source.in_recovery or not rows:
        return Review(findings), source
    now = look_at_tables(connection, publication, rows)
    tables = tuple(
        (row, finding)
        for row in rows
        for finding in compare_table(row, now[row.table], publication)
    )
    return Review(findings, tables), source


def remember(store: LogStore, source: Source) -> None:
    """Write down what the log is being made from; only after a review without errors."""
    now = {
        "system_identifier": source.system,
        "timeline": str(source.timeline),
        "database": source.database,
        "publication": source.publication,
    }
    for key, value in now.items():
        if value is not None and store.meta(key) != value:
            store.set_meta(key, value)
