"""What the database has beside the configuration: slots nobody reads, tables left and new.

A renamed source, and a table that was taken out of the configuration, go on using disk space at the
source and in staging. That may be on purpose, so nothing is removed, only reported with the SQL.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from psycopg import sql

from cdc_assets.config.collisions import COPY_NAME
from cdc_assets.config.patterns import TablePattern, matching
from cdc_assets.config.source import SourceConfig
from cdc_assets.config.tables import TableConfig
from cdc_assets.log.states import TableState
from cdc_assets.log.store import LogStore
from cdc_assets.log.table_row import TableRow
from cdc_assets.messages.findings import Finding
from cdc_assets.messages.texts import command
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.publication.contents import (
    inserts_publication,
    published_in_bulk,
    published_tables,
)
from cdc_assets.postgres.publication.statements import removal
from cdc_assets.postgres.session.connect import Connection
from cdc_assets.readiness.source.now import look_at_tables

# A slot's reader may be between two sessions; its slot keeps less than this meanwhile.
UNREAD_BYTES = 10**9
# A finding names this many tables at most.
LISTED = 20

_UNREAD = """
select slot_name::text, pg_wal_lsn_diff(case when pg_is_in_recovery() then pg_last_wal_replay_lsn()
                                        else pg_current_wal_lsn() end, restart_lsn)::bigint
  from pg_catalog.pg_replication_slots
 where plugin = 'pgoutput' and database = current_database() and not temporary
   and active_pid is null and restart_lsn is not null and slot_name <> %s
 order by 2 desc
"""


# Ordinary and partitioned tables; not those of extensions, and of the SQL catalog and the log of
# this source and of others. A partition is part of its root.
_REPLICABLE = """
select n.nspname::text, c.relname::text
  from pg_catalog.pg_class c
  join pg_catalog.pg_namespace n on n.oid = c.relnamespace
 where c.relkind in ('r', 'p') and not c.relispartition and c.relpersistence <> 't'
   and n.nspname not in ('pg_catalog', 'information_schema', %s)
   and c.relname not in ('iceberg_tables', 'iceberg_namespace_properties')
   and not exists (select from pg_catalog.pg_class l
                    where l.relnamespace = n.oid and l.relname = 'log_index'
                      and exists (select from pg_catalog.pg_class m
                                   where m.relnamespace = n.oid and m.relname = 'pipeline_meta'))
   and not exists (select from pg_catalog.pg_depend d
                    where d.classid = 'pg_catalog.pg_class'::regclass and d.objid = c.oid
                      and d.deptype = 'e')
 order by c.oid
"""


def replicable(connection: Connection, config: SourceConfig) -> list[TableId]:
    """The tables of the database that could be replicated, the oldest first; waits for no lock."""
    rows = connection.execute(_REPLICABLE, (config.state.schema_,))
    return [TableId(schema, name) for schema, name in rows]


def of_patterns(config: SourceConfig, there: Sequence[TableId]) -> dict[TableId, TableConfig]:
    """The tables that patterns of ``config`` stand for, with the settings of the first such one."""
    named = {table.id for table in config.tables if not table.found}
    without = {*matching(map(TablePattern.parse, config.exclude), there)[0]}
    if config.backfills.signals is not None:
        without.add(TableId.parse(config.backfills.signals))
    if config.markers.id is not None:
        without.add(config.markers.id)
    found = dict[TableId, TableConfig]()
    for entry in config.patterns:
        assert entry.pattern is not None
        for table in there:
            if table not in named and table not in without and entry.pattern.matches(table):
                found.setdefault(table, entry)
    return found


def lake_names(
    config: SourceConfig, stood: Mapping[TableId, TableConfig], there: Sequence[TableId]
) -> tuple[dict[TableId, str], dict[TableId, str]]:
    """What each table of ``stood`` is called in the lake; and why one isn't taken there, if so.

    ``stood`` is of :func:`of_patterns`, ``there`` all tables of the source.
    """
    named = {config.lake_name(table.id).lower() for table in config.tables if not table.found}
    if config.namespace == "health":  # where the source has an asset of its own
        named.add(config.name)
    called, unnamed = dict[TableId, str](), dict[TableId, str]()
    found, alone = set[str](), _of_one_schema(config)
    names = named | {table.name.lower() for table in there}
    for table in stood:
        name = table.name
        if not alone or f"{config.lake.prefix}{name}".lower() in named:
            name = f"{table.schema}_{name}"
        name = config.lake.called(name)
        if not config.lake.catalog.takes(name):
            unnamed[table] = "Glue takes no such name; give it another one"
        elif name.lower() in named | found:
            unnamed[table] = "another table has its name in the lake; name it"
        elif (copy := COPY_NAME.match(name)) and copy[1].lower() in names:
            unnamed[table] = f"a copy of {copy[1]} may have its name in the lake; name it"
        else:
            found.add(name.lower())
            called[table] = name
    return called, unnamed


def _of_one_schema(config: SourceConfig) -> bool:
    """Whether all tables that may ever be found are."""
    found = {table.pattern.only_schema for table in config.patterns if table.pattern is not None}
    return len(found) == 1 and None not in found


def new_findings(connection: Connection, config: SourceConfig) -> Iterator[Finding]:
    """Tables that a pattern stands for, and that aren't replicated: new ones, and left out."""
    if not config.patterns:
        return
    known, there = {table.id for table in config.tables}, replicable(connection, config)
    _, idle = matching(map(TablePattern.parse, config.exclude), there)
    if unknown := [text for text in idle if TablePattern.parse(text).is_name]:
        yield Finding(
            "exclude_unknown",
            "warning",
            f"exclude: names tables that the source doesn't have: {', '.join(unknown[:LISTED])}.",
            "Correct their names, or take them out.",
        )
    stood = of_patterns(config, there)
    called, unnamed = lake_names(config, stood, there)
    if new := [table for table in called if table not in known]:
        yield Finding(
            "tables_new",
            "warning",
            f"since the source was loaded there came tables that tables: stands for: {_some(new)}.",
            "Reload the code location, or start the command again; or name them in exclude:.",
        )
    if out := [table for table in unnamed if table not in known]:
        yield Finding(
            "tables_unnamed",
            "warning",
            f"tables that tables: stands for are left out, as the lake can't have them by the names"
            f" that they have: {_some(out)}.",
            "Another table has the name there (the lake ignores case), or may have it, or the"
            " catalog doesn't take it: name each of them in tables:, with as:; or in exclude:.",
        )


def _some(tables: Sequence[TableId]) -> str:
    return ", ".join(map(str, tables[:LISTED])) + (", …" if len(tables) > LISTED else "")


def still_followed(
    connection: Connection, config: SourceConfig, rows: Iterable[TableRow]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The tables that the log has and the configuration hasn't.

    First those that are published, whose changes are staged; then those that were dropped.
    """
    wanted = {table.id for table in config.tables}
    left = [row for row in rows if row.oid and row.table not in wanted]
    now = look_at_tables(connection, config.publication, left) if left else {}
    dropped = {table for table, found in now.items() if found.was_dropped}
    sent = {table for table, found in now.items() if found.published or found.published_as}
    return (
        tuple(
            str(row.table)
            for row in left
            if row.table in sent - dropped and row.state != TableState.PARKED
        ),
        tuple(str(row.table) for row in left if row.table in dropped),
    )


def left_findings(
    connection: Connection, config: SourceConfig, store: LogStore | None
) -> Iterator[Finding]:
    """Findings about leftovers of this source's past at the database."""
    ours = config.slot if config.decodes else f"cdc_{config.log_name}"
    for slot, kept in connection.execute(_UNREAD, (ours,)).fetchall():
        yield Finding(
            "slot_unread",
            "warning" if kept >= UNREAD_BYTES else "info",
            f"nobody reads the slot {slot}, which keeps {kept / 1e6:,.1f} MB of WAL: it is of a"
            " source that is down, or was renamed or removed, or of another program.",
            f"select pg_drop_replication_slot({sql.Literal(slot).as_string(connection)});"
            " -- if nobody needs it",
        )
    if store is None:
        return
    whole, inserts = config.publication, inserts_publication(config.publication)
    published = {name: published_tables(connection, name) or {} for name in (whole, inserts)}
    wanted = {table.id for table in config.tables}
    for row in store.tables():
        if row.table in wanted and row.state == TableState.PARKED:
            resync = command("resync", row.table)
            if not row.oid:
                way_out = "If it is: the flusher takes it up within a minute, or when it starts."
            else:
                way_out = "" if resync in (row.reason or "") else f"If it is: {resync}"
            said = f"{row.table} is parked, whether or not the cause is mended: {row.reason}"
            yield Finding("table_parked", "warning", said, way_out)
        name = inserts if row.inserts_only else whole
        if row.table in wanted:
            continue
        if row.table not in published[name]:
            if row.oid and row.state == TableState.PARKED:
                yield Finding(
                    "table_left",
                    "warning",
                    f"{row.table} is parked and isn't in the configuration any more; what was"
                    f" staged of it is kept. Why it was parked: {row.reason}",
                    f"{command('drop-table', row.table)}; or put it back",
                    str(row.table),
                )
            continue
        if config.log is not None:  # the publication is the first source's, which needs it
            if row.oid:
                yield Finding(
                    "table_left",
                    "warning",
                    f"{row.table} isn't in the configuration any more, but what source"
                    f" {config.log.of} stages of it goes on being kept for it.",
                    f"{command('drop-table', row.table)}; or put it back",
                    str(row.table),
                )
            continue
        if not row.oid:  # it was let go
            if published_in_bulk(connection, name, published[name][row.table]):
                continue
            yield Finding(
                "table_left",
                "info",
                f"{row.table} was given up, but the publication {name} goes on sending its changes,"
                " which nobody stages.",
                f"{removal(connection, name, [row.table])}; -- as its owner",
                str(row.table),
            )
            continue
        yield Finding(
            "table_left",
            "warning",
            f"{row.table} isn't in the configuration any more, but its changes go on being staged,"
            " and nothing removes them.",
            f"{removal(connection, name, [row.table])}; -- as its owner; or with all that is staged"
            f" of it: {command('drop-table', row.table)}; or put it back",
            str(row.table),
        )
