"""The server that first copies are read from, if it isn't the source (``snapshot.from``).

It is asked where its data parted from the source's: what committed below that LSN, the *point*, it
has, and nothing else. So a table can be copied there whose log is whole from the point on, or from
earlier. Whether somebody wrote to it since can't be seen from outside.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import LiteralString, Self

import psycopg

from cdc_assets.config.addresses import (
    copy_dsn,
    copy_replication_dsn,
    replication_dsn,
    source_dsn,
)
from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import CdcError, first_line
from cdc_assets.log.states import TableState
from cdc_assets.log.table_row import TableRow
from cdc_assets.messages.findings import Finding
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.session.connect import Connection, connect
from cdc_assets.postgres.slots import system_identifier
from cdc_assets.postgres.timelines import History, parted
from cdc_assets.readiness.flushing import known_log
from cdc_assets.readiness.restored import awaited, other_collation, other_restored, unknown_lsn

# Since this version a standby says whether its replay has stopped, and not only is to stop.
PAUSE_STATE = 140000
_SERVER: LiteralString = """
select (select oid::text from pg_catalog.pg_database
         where datname = pg_catalog.current_database()),
       pg_catalog.pg_is_in_recovery(), pg_catalog.pg_last_wal_replay_lsn()::text,
       pg_catalog.pg_is_in_recovery() and {paused},
       pg_catalog.current_setting('default_transaction_read_only') = 'on',
       case when pg_catalog.current_setting('hot_standby_feedback') = 'on'
              or pg_catalog.current_setting('max_standby_streaming_delay') = '-1' then ''
            else 'after ' || pg_catalog.current_setting('max_standby_streaming_delay') end
"""
_SOURCE: LiteralString = """
select (select oid::text from pg_catalog.pg_database
         where datname = pg_catalog.current_database()),
       case when pg_catalog.pg_is_in_recovery() then pg_catalog.pg_last_wal_replay_lsn()
            else pg_catalog.pg_current_wal_insert_lsn() end::text
"""


@dataclass(frozen=True, slots=True)
class CopyServer:
    """Cluster, database and position of the server; ``parted``: where it left the source."""

    system: str
    database: str
    replayed: Lsn | None
    """How far a standby is; None once it was promoted."""
    paused: bool
    read_only: bool
    cancels: str
    """After how long a standby ends queries that hold up its replay; empty: it doesn't."""
    parted: Lsn | None

    @classmethod
    def look(cls, there: Connection, config: SourceConfig) -> Self:
        """As it is now. Raises psycopg.Error, ReplicationLost or PreflightError."""
        known = there.info.server_version >= PAUSE_STATE
        paused = "pg_catalog.pg_get_wal_replay_pause_state() = 'paused'" if known else "false"
        row = there.execute(_SERVER.replace("{paused}", paused).encode()).fetchone()
        assert row is not None
        database, in_recovery, replayed, stopped, read_only, cancels = row
        histories = (replication_dsn(config), copy_replication_dsn(config))
        return cls(
            system_identifier(there),
            database,
            Lsn.parse(replayed) if in_recovery and replayed else None,
            bool(stopped),
            read_only,
            cancels,
            parted(*map(History.read, histories)),
        )

    @property
    def stands(self) -> bool:
        """Whether it replays nothing: what it shows stays as it is."""
        return self.replayed is None or self.paused

    @property
    def point(self) -> Lsn | None:
        """What committed below it is there, and nothing else of the source; None: no such LSN."""
        return self.parted if self.replayed is None else self.replayed


def is_replica(config: SourceConfig) -> bool:
    """Whether first copies are read from a standby that goes on meanwhile: the source, perhaps."""
    origin = config.snapshot.from_
    return origin.kind == "replica" if origin is not None else config.postgres.standby


def is_dump(config: SourceConfig) -> bool:
    """Whether first copies are read from a restored dump: it has oids and pages of its own."""
    return config.snapshot.from_ is not None and config.snapshot.from_.kind == "dump"


def problem(server: CopyServer, source: Connection, *, goes_on: bool = False) -> Finding | None:
    """What keeps every table from being copied there; ``goes_on``: it is to be a replica."""
    row = source.execute(_SOURCE).fetchone()
    assert row is not None
    database, end = row[0], Lsn.parse(row[1])
    if (ours := system_identifier(source)) != server.system or database != server.database:
        what = f"is another cluster ({server.system}) than the source's ({ours})"
        if ours == server.system:
            what = "has another database in its address than the source's"
        return Finding(
            "clone_other_cluster",
            "error",
            f"the server of snapshot.from {what}.",
            "Correct snapshot.from.dsn. A restored pg_dump is no physical copy.",
        )
    point = server.point
    strange = point is None or point > end or (server.parted is not None and point > server.parted)
    if strange:
        where = f"has WAL up to {point} that the source doesn't have"
        if point is None:
            where = "is on the source's own timeline, and no standby: the source itself, perhaps"
        return Finding(
            "clone_other_timeline",
            "error",
            f"the server of snapshot.from {where}.",
            "Give the address of a copy of the source: promoted, or a standby whose replay is"
            " paused.",
        )
    if server.replayed is None and goes_on:
        return Finding(
            "replica_promoted",
            "error",
            "the server of snapshot.from is no standby (any more).",
            "Write kind: clone, if nobody writes to it; or give a standby's address.",
        )
    if not server.stands and not goes_on:
        return Finding(
            "clone_not_paused",
            "error",
            "the server of snapshot.from is a standby that goes on: it shows another moment to each"
            " chunk.",
            "Pause it there: select pg_wal_replay_pause(); (before Postgres 14 that can't be seen)."
            " Or promote it: select pg_promote();",
        )
    return None


def behind(
    table: TableId, begin: Lsn | None, point: Lsn, *, goes_on: bool = False
) -> Finding | None:
    """Whether a copy of the ``point`` lacks what the table's log doesn't have, either."""
    if begin is not None and begin <= point:
        return None
    if goes_on:
        return Finding(
            "replica_behind",
            "warning",
            f"{table}: the replica of snapshot.from has replayed up to {point}, and its log begins"
            f" at {begin or 'no LSN yet'}.",
            "It is copied once the replica has got there.",
            str(table),
        )
    when = f"begins at {begin}" if begin is not None else "has no beginning yet"
    return Finding(
        "clone_behind_log",
        "error",
        f"{table}: the server of snapshot.from has what committed below {point}, but the log of the"
        f" table {when}: what changed between is in neither.",
        "Make the copy anew, now that the log has begun; or remove snapshot.from.",
        str(table),
    )


def other_table(table: TableId, why: str = "") -> Finding:
    """``why``: what is known of it, in parentheses."""
    return Finding(
        "clone_other_table",
        "error",
        f"{table}: at the server of snapshot.from it isn't the table that the source has now, with"
        f" these columns, key, publication and filter, or it is locked there{why}.",
        "Make the copy anew: it was altered at the source since, or when its log had begun.",
        str(table),
    )


def unstopped(table: TableId) -> Finding:
    """A replica's snapshot may show a commit more than is known."""
    return Finding(
        "replica_not_paused",
        "error",
        f"{table}: of a table without a key, or whose lake table isn't a mirror, it has to be known"
        " to the byte what the replica's snapshot shows, and its replay can't be stopped for that"
        " moment.",
        "On the primary: grant execute on function pg_wal_replay_pause(), pg_wal_replay_resume() to"
        " the role of snapshot.from.dsn; from Postgres 14 on.",
        str(table),
    )


def conflicts(what: str) -> Finding:
    """A replica ends, or did, who needs rows that its primary has removed."""
    return Finding(
        "replica_conflicts",
        "warning",
        what,
        "On the replica: alter system set max_standby_streaming_delay = -1; (replay waits) or"
        " alter system set hot_standby_feedback = on; (VACUUM at the primary keeps such rows)"
        " select pg_reload_conf();",
    )


def unreachable(error: Exception) -> Finding:
    """The address is in no message."""
    what = error.what if isinstance(error, CdcError) else first_line(error)
    return Finding(
        "clone_unreachable",
        "error",
        f"the server of snapshot.from can't be asked: {what}",
        "Start it, or correct snapshot.from: its role reads the tables, and replicates"
        " (replication_dsn: of another role that does).",
    )


def copy_findings(config: SourceConfig) -> Iterator[Finding]:
    """What ``check`` says of the server, while tables are still to be copied."""
    if config.snapshot.from_ is None:
        return
    try:
        with known_log(config) as (store, _):
            rows = store.tables() if store is not None else []
        due = [row for row in rows if row.state in (TableState.WAITING, TableState.COPYING)]
        if is_dump(config):
            yield from _of_dump(config, due)
        elif not rows or due:
            with connect(source_dsn(config), application_name="cdc_assets check") as source:
                yield from _findings(config, source, due)
    except (psycopg.Error, CdcError):
        return  # of the source or the log, which is told by others


def _of_dump(config: SourceConfig, due: Iterable[TableRow]) -> Iterator[Finding]:
    """Why tables wait, as was found when they were to be pinned."""
    origin = config.snapshot.from_
    assert origin is not None
    point = Lsn.parse(origin.lsn) if origin.lsn is not None else Lsn.ZERO
    for row in due:
        begin, said = row.snapshot_lsn or row.log_from, row.reason or ""
        told = [awaited(row.table), unknown_lsn(row.table, point), other_restored(row.table)]
        told += [other_collation(row.table)]
        told += [found] if (found := behind(row.table, begin, point)) is not None else []
        yield from (finding for finding in told if said.startswith(f"{finding.code}:"))
    if due and origin.dsn is not None:
        try:
            connect(copy_dsn(config), application_name="cdc_assets check").close()
        except (psycopg.Error, CdcError) as error:
            yield unreachable(error)


def _findings(
    config: SourceConfig, source: Connection, due: Iterable[TableRow]
) -> Iterator[Finding]:
    try:
        with connect(copy_dsn(config), application_name="cdc_assets check") as there:
            server = CopyServer.look(there, config)
    except (psycopg.Error, CdcError) as error:
        yield unreachable(error)
        return
    goes_on = is_replica(config)
    if (found := problem(server, source, goes_on=goes_on)) is not None:
        yield found
        return
    assert server.point is not None  # else it has a problem
    yield from _waiting(due, server.point, goes_on=goes_on)
    if goes_on and server.cancels:
        yield conflicts(
            "the replica of snapshot.from ends whoever still needs rows that VACUUM has removed at"
            f" the primary, {server.cancels}: then a copy's snapshot is lost. A mirror of a table"
            " with a key goes on under another one, other tables are copied anew."
        )
    if server.replayed is None and not server.read_only:
        yield Finding(
            "clone_writable",
            "warning",
            "the server of snapshot.from takes writes: nobody could tell that its rows aren't the"
            " source's any more.",
            "On it: alter system set default_transaction_read_only = on; select pg_reload_conf();"
            " -- and once the tables are copied: cdc-assets verify",
        )


def _waiting(due: Iterable[TableRow], point: Lsn, *, goes_on: bool) -> Iterator[Finding]:
    for row in due:
        if row.state != TableState.WAITING or not row.oid:
            continue
        begin, said = row.snapshot_lsn or row.log_from, row.reason or ""
        told = (other_table(row.table), unstopped(row.table))
        if found := behind(row.table, begin, point, goes_on=goes_on):
            yield found
        yield from (finding for finding in told if said.startswith(f"{finding.code}:"))
