"""The source's present state and the log's record of it: the queries, not the verdict.

Read-only, and cheap enough for the start of each session and for repeats during it: a handful of
queries, however many tables there are. ``restart_record`` judges the differences.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import LiteralString

from psycopg import sql

from cdc_assets.config.addresses import replication_dsn
from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import PreflightError
from cdc_assets.log.copies.chunks import last_read
from cdc_assets.log.store import LogStore
from cdc_assets.log.table_row import TableRow
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.publication.contents import (
    COLUMN_LISTS,
    inserts_publication,
    publication_of,
)
from cdc_assets.postgres.publication.shape import PublishedShape
from cdc_assets.postgres.session.connect import Connection
from cdc_assets.postgres.session.waits import locked
from cdc_assets.postgres.slots import (
    RECEIVED,
    SlotStatus,
    sent_through,
    slot_status,
    system_identifier,
)
from cdc_assets.postgres.timelines import History, parted
from cdc_assets.readiness.source.enrolment import made_otherwise, shown_by_generated
from cdc_assets.readiness.source.partitions import UNLOGGED
from cdc_assets.readiness.source.record import (
    PublishedAs,
    Recorded,
    Review,
    SlotRestart,
    Source,
    TableNow,
)
from cdc_assets.readiness.source.restart_record import compare, compare_table


def recorded(store: LogStore) -> Recorded:
    """The coordination database's record of the source."""
    timeline, restart = store.meta("timeline"), store.meta("slot_restart_lsn")
    return Recorded(
        store.flushed_lsn(),
        store.meta("system_identifier"),
        int(timeline) if timeline else None,
        store.meta("database"),
        store.meta("publication"),
        SlotRestart.parse(restart) if restart else None,
        last_read(store),
        _history(store, int(timeline)) if timeline else None,
    )


def _history(store: LogStore, timeline: int) -> History | None:
    """None if the record is of an earlier version, which knew the number alone."""
    said = store.meta("timeline_history")
    found = History.parse(said) if said is not None else History(1)
    return found if found.timeline == timeline else None


def look(
    connection: Connection,
    dsn: str,
    slot: SlotStatus | None,
    publication: str,
    known: Recorded,
    *,
    standby: bool = False,
    begins: bool = False,
) -> Source:
    """The source's present state; ``dsn`` is for its timeline's history, which replication tells.

    That is asked for if the timeline has another number than the recorded one, or if a stream
    ``begins``. Of a server in recovery nothing else tells the number: ``standby``: it is asked for.
    """
    row = connection.execute(
        "select pg_is_in_recovery(), case when pg_is_in_recovery() then pg_last_wal_replay_lsn()"
        " else pg_current_wal_insert_lsn() end::text, (select oid::text from pg_catalog.pg_database"
        " where datname = current_database()), current_database()::text,"
        " (select oid::text from pg_catalog.pg_publication where pubname = %s),"
        f" {RECEIVED}::text",
        (publication,),
    ).fetchone()
    assert row is not None
    in_recovery, end, database, name, published, received = row
    timeline, history = 0, None
    if not in_recovery:
        # A WAL file's name begins with the timeline; the control file lags behind a promotion.
        found = connection.execute(
            "select substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8)"
        ).fetchone()
        timeline = int(str(found[0]), 16) if found else 0
        if timeline == 1:
            history = History(1)
        elif known.timeline not in (None, timeline):
            history = History.read(dsn)
        elif begins:
            with suppress(PreflightError):  # its file may be gone where nobody was promoted lately
                history = History.read(dsn)
    elif standby:
        history = History.read(dsn)
    source = Source(
        in_recovery,
        system_identifier(connection),
        timeline if history is None else history.timeline,
        Lsn.parse(end or "0/0"),
        database,
        name,
        published,
        slot,
        received=Lsn.parse(received or "0/0"),
        history=history,
    )
    if history is None or known.timeline is None or source.system != known.system:
        return source
    left_at = history.left(known.timeline)
    at = left_at if known.history is None else parted(known.history, history)
    descends = at is not None and at == left_at
    sent = sent_through(connection, slot.name) if standby and slot and descends else None
    return replace(source, left_at=at, sent=sent)


def followed(store: LogStore) -> list[TableRow]:
    """The tables whose log has to be without a gap."""
    return [row for row in store.tables() if row.followed_since is not None]


# By the publications' own entries: pg_publication_tables would wait for the lock of each table.
_TABLES: LiteralString = """
with wanted as (
    select * from unnest(%(schemas)s::text[], %(names)s::text[], %(oids)s::oid[],
                         %(publications)s::text[], %(inserts_only)s::bool[],
                         %(excluded)s::jsonb[], %(hidden)s::jsonb[])
        w (schema_name, table_name, old, publication, inserts_only, excluded, hidden)),
publication as (
    select p.*, p.xmin::text as version from pg_catalog.pg_publication p
     where p.pubname = any(%(publications)s::text[]))
select w.schema_name, w.table_name, c.oid, coalesce(c.relkind::text, ''),
       {unlogged}, above.root,
       (select format('%%I.%%I', o_n.nspname, o.relname) from pg_catalog.pg_class o
          join pg_catalog.pg_namespace o_n on o_n.oid = o.relnamespace where o.oid = w.old),
       present.entry is not null,
       former.entry, p.oid::bigint, p.pubowner::bigint, p.version,
       coalesce(p.pubinsert and p.pubtruncate
                and (p.pubupdate and p.pubdelete or w.inserts_only), true),
       coalesce(p.pubviaroot, true),
       former.filter is not null, coalesce(former.lacking, false), former.filter,
       exists (select from pg_catalog.pg_publication p, lateral ({of_old}) e
                where p.pubname = any(%(both)s::text[]) and p.pubname <> w.publication)
  from wanted w
  left join publication p on p.pubname = w.publication
  left join pg_catalog.pg_namespace n on n.nspname = w.schema_name
  left join pg_catalog.pg_class c on c.relnamespace = n.oid and c.relname = w.table_name
  left join lateral ({of_c}) present on true
  left join lateral ({of_old}) former on true
  left join lateral (
       select format('%%I.%%I', a_n.nspname, a_c.relname) as root
         from pg_catalog.pg_partition_ancestors(c.oid::regclass) a (relid)
         join pg_catalog.pg_class a_c on a_c.oid = a.relid
         join pg_catalog.pg_namespace a_n on a_n.oid = a_c.relnamespace,
              pg_catalog.pg_publication p, lateral ({of_root}) e
        where c.relispartition and a.relid <> c.oid
          and p.pubname = any(%(both)s::text[]) and p.pubviaroot
        limit 1) above on true
"""
# A partition that isn't named itself is sent as its root, if anything is.
_ENTRY: LiteralString = """
select * from (
    select 'entry ' || r.oid as entry, {filter} as filter, {lacking} as lacking, 1 as place
      from pg_catalog.pg_publication_rel r where r.prpubid = p.oid and r.prrelid = {relation}
    {by_schema}
    union all
    select 'all', null, false, 3 from pg_catalog.pg_class k
     where p.puballtables and k.oid = {relation} and not (k.relispartition and p.pubviaroot)
) e order by place limit 1
"""
_BY_SCHEMA: LiteralString = """
    union all
    select 'schema ' || s.oid, null, false, 2
      from pg_catalog.pg_publication_namespace s
      join pg_catalog.pg_class k on k.relnamespace = s.pnnspid
     where s.pnpubid = p.oid and k.oid = {relation} and not (k.relispartition and p.pubviaroot)
"""


# To write it the server takes a lock of the table. Of a locked one it is as before: another filter
# is another entry.
_FILTER: LiteralString = """
case when r.prqual is null or r.prrelid <> all(%(busy)s::oid[])
     then pg_catalog.pg_get_expr(r.prqual, r.prrelid) else '' end
"""
# A column list may leave out excluded columns, known by name or number.
_LACKING: LiteralString = """
r.prattrs is not null and exists (
    select from pg_catalog.pg_attribute x
     where x.attrelid = {relation} and x.attnum > 0 and not x.attisdropped and x.attgenerated = ''
       and x.attnum <> all(r.prattrs::int2[])
       and not w.excluded ? x.attname::text and not w.hidden @> pg_catalog.to_jsonb(x.attnum))
"""


def _entry(relation: LiteralString, *, lists: bool) -> sql.Composed:
    """The publication p's entry for a relation, at most one row; ``lists``: since Postgres 15."""
    by_schema = sql.SQL(_BY_SCHEMA if lists else "").format(relation=sql.SQL(relation))
    return sql.SQL(_ENTRY).format(
        relation=sql.SQL(relation),
        by_schema=by_schema,
        filter=sql.SQL(_FILTER if lists else "null::text"),
        lacking=sql.SQL(_LACKING if lists else "false").format(relation=sql.SQL(relation)),
    )


def look_at_tables(
    connection: Connection, publication: str, rows: Sequence[TableRow]
) -> dict[TableId, TableNow]:
    """The registered tables as the source has them now: one query, however many there are.

    It waits for no lock.
    """
    lists = connection.info.server_version >= COLUMN_LISTS
    filtered = {row.table: row for row in rows if row.row_filter is not None}
    busy = locked(connection, [*filtered])
    query = sql.SQL(_TABLES).format(
        of_c=_entry("c.oid", lists=lists),
        of_old=_entry("w.old", lists=lists),
        of_root=_entry("a.relid", lists=lists),
        unlogged=sql.SQL(UNLOGGED),
    )
    found = connection.execute(
        query,
        {
            "schemas": [row.table.schema for row in rows],
            "names": [row.table.name for row in rows],
            "oids": [row.oid for row in rows],
            "publications": [
                publication_of(publication, inserts_only=row.inserts_only) for row in rows
            ],
            "inserts_only": [row.inserts_only for row in rows],
            "excluded": [json.dumps(sorted(row.excluded)) for row in rows],
            "hidden": [json.dumps(sorted(row.excluded_numbers)) for row in rows],
            "both": [publication, inserts_publication(publication)],
            "busy": [filtered[table].oid for table in busy],
        },
    ).fetchall()
    tables = {}
    for schema, name, oid, kind, unlogged, root, renamed, published, entry, *rest in found:
        pub_oid, owner, version, *shape, row_filter, twice = rest
        now, table = PublishedShape(*shape), TableId(schema, name)
        tables[table] = TableNow(
            int(oid) if oid is not None else None,
            kind,
            unlogged,
            root,
            renamed,
            published,
            PublishedAs(entry, f"{pub_oid} {owner} {now.letters}", version) if entry else None,
            now,
            filtered[table].row_filter if row_filter == "" else row_filter,
            twice,
        )
    return tables


def review(
    connection: Connection, config: SourceConfig, store: LogStore, *, begins: bool = False
) -> tuple[Review, Source]:
    """Compare everything; changes nothing. ``begins``: see :func:`look`.

    A flusher may be at work: slot, log and end of WAL are read in this order, in which none may be
    ahead of the next.
    """
    slot, publication = config.slot, config.publication
    stands = slot_status(connection, slot)
    known = recorded(store)
    standby = config.postgres.standby
    dsn = replication_dsn(config)
    source = look(connection, dsn, stands, publication, known, standby=standby, begins=begins)
    findings = tuple(compare(known, source, slot, publication, standby=standby))
    rows = followed(store)
    if (source.in_recovery and not standby) or not rows:
        return Review(findings), source
    now = look_at_tables(connection, publication, rows)
    configured = {table.id: table for table in config.tables}
    tables = tuple(
        (row, finding)
        for row in rows
        for finding in (
            made_otherwise(row, config),
            *compare_table(row, now[row.table], publication, configured.get(row.table)),
        )
        if finding is not None
    )
    tables += tuple(shown_by_generated(connection, config, rows))
    wrong = {row.table for row, _ in tables}
    entries = tuple(
        (row, entry)
        for row in rows
        if row.table not in wrong
        and (entry := now[row.table].published_as) is not None
        and str(entry) != row.published_as
    )
    filters = tuple(
        (row, now[row.table].row_filter)
        for row in rows
        if row.table not in wrong and now[row.table].row_filter != row.row_filter
    )
    return Review(findings, tables, entries, filters), source


def remember(store: LogStore, source: Source) -> None:
    """Record the source that the log is made from; only after a review without errors.

    Of a log that was given up meanwhile nothing is recorded.
    """
    now = {
        "system_identifier": source.system,
        "timeline": str(source.timeline),
        "database": source.database,
        "publication": source.publication,
        "timeline_history": None if source.history is None else str(source.history),
    }
    changed = {key: value for key, value in now.items() if value is not None}
    changed = {key: value for key, value in changed.items() if store.meta(key) != value}
    if changed:
        store.record(changed)
