"""Preconditions of the flusher; all failures are reported together.

The flusher's part of ``check`` (``surroundings`` has the rest: every flusher imports this module,
which must not import Spark). Errors that a process meets at work are handled there. ``admission``
judges the log's record of the source, because it decides whether to start anew; here the record is
only reported beside other errors. An error of one table never stops the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import sql

from cdc_assets.config.addresses import coordination_dsn, source_dsn
from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import CdcError, NotReady, StagingProblem, first_line
from cdc_assets.log.moving.mark import mark_of
from cdc_assets.log.schema.ownership import ownership_findings
from cdc_assets.log.schema.versions import newest, version
from cdc_assets.log.staged.places import staged_place, staged_places
from cdc_assets.log.staged.storage import Storage, check_place
from cdc_assets.log.store import LogStore
from cdc_assets.messages.findings import Finding
from cdc_assets.postgres.session.connect import LOCK_SECONDS, connect, pools_transactions
from cdc_assets.process.home import at_home
from cdc_assets.readiness.foreign_errors import ANSWERS, OUT, refuses_login
from cdc_assets.readiness.source.server import preflight

# A database that is down comes back by itself: callers wait for it, or try again.
_PASSING = frozenset(
    {
        "source_unreachable",
        "replication_unreachable",
        "coordination_unreachable",
        "coordination_read_only",
    }
)


def refuse(findings: Iterable[Finding]) -> None:
    """Raise NotReady naming every error, if there is one that waiting may not mend.

    If databases that are down are the only errors, nothing is raised: the next code that connects
    meets them, and decides whether to wait.
    """
    errors = list(dict.fromkeys(f for f in findings if f.severity == "error" and f.table is None))
    if {finding.code for finding in errors} - _PASSING:
        raise NotReady(
            [finding.code for finding in errors],
            "; ".join(f"{f.code}: {f.message.rstrip('.')}" for f in errors) + ".",
            " ".join(dict.fromkeys(finding.remedy for finding in errors if finding.remedy)),
        )


def refuse_to_flush(config: SourceConfig) -> None:
    """Raise NotReady if anything is wrong that the flusher of ``config`` needs.

    Tables aren't checked one by one: there may be thousands, and their registration parks those
    that can't go on. Costs a few round trips, and one small file.
    """
    refuse([*source_findings(config, start=True), *coordination_findings(config), *staging(config)])


def source_findings(config: SourceConfig, *, start: bool = False) -> list[Finding]:
    """Findings about the source.

    ``start``: without single tables; the log's record of the source is only compared if there is
    another error.
    """
    try:
        dsn = source_dsn(config)
        with (
            connect(dsn, application_name="cdc_assets check", lock_seconds=LOCK_SECONDS) as source,
            known_log(config) as (store, older),
        ):
            if not start:
                found = preflight(source, config, store, dsn)
                return [f for f in found if not (older and f.code == "slot_unrecorded")]
            found = preflight(source, config, None, dsn, tables=(), record=False)
            wrong = any(finding.severity == "error" for finding in found)
            return preflight(source, config, store, dsn, tables=()) if wrong else found
    except (psycopg.OperationalError, CdcError) as error:
        return [
            Finding(
                "source_unreachable",
                "error",
                f"the source {_refusal(error)}: {_what(error)}",
                _remedy(error, "postgres.dsn"),
            )
        ]


def _what(error: Exception) -> str:
    return error.what if isinstance(error, CdcError) else first_line(error)


def _refusal(error: Exception) -> str:
    return "doesn't take the login" if refuses_login(error) else "can't be reached"


def _remedy(error: Exception, setting: str) -> str:
    if isinstance(error, CdcError) and error.remedy:
        return error.remedy
    return (ANSWERS if refuses_login(error) else OUT) + f"correct {setting}."


@contextmanager
def known_log(config: SourceConfig) -> Iterator[tuple[LogStore | None, bool]]:
    """The log's record of the source, None if it can't be read; never created or migrated here.

    The flag: whether the record is of an older version, and can be read only after an upgrade.
    """
    store, found = None, list(coordination_findings(config))
    if not any(finding.severity == "error" for finding in found):
        store = LogStore.peek(coordination_dsn(config), config.name, config.state.schema_)
    try:
        yield store, any(finding.code == "coordination_older" for finding in found)
    finally:
        if store is not None:
            store.close()


def coordination_findings(config: SourceConfig) -> Iterator[Finding]:
    """Findings about the coordination database."""
    dsn = ""
    try:
        dsn = coordination_dsn(config)
        with connect(dsn, application_name="cdc_assets check") as state:
            yield from _coordination(state, config.state.schema_, config.name)
            if pools_transactions(state, dsn):
                yield Finding(
                    "coordination_pooler",
                    "error",
                    "the coordination database is reached through a transaction pooler: session"
                    " locks don't survive there.",
                    "Give the database's own address, or a session-mode pool.",
                )
    except (psycopg.OperationalError, CdcError) as error:
        yield Finding(
            "coordination_unreachable",
            "error",
            f"the coordination database {_refusal(error)}: {_what(error)}",
            _remedy(error, "state.postgres_url"),
        )


# The role, and its rights: make the schema; make tables in it (NULL where there is no such
# schema); look into it; alter its tables; write to all of them.
_RIGHTS = """
select current_user::text, current_database()::text,
       pg_catalog.current_setting('transaction_read_only') = 'on',
       pg_catalog.has_database_privilege(pg_catalog.current_database(), 'CREATE'),
       pg_catalog.has_schema_privilege(n.oid, 'CREATE'),
       pg_catalog.has_schema_privilege(n.oid, 'USAGE'),
       coalesce(t.owned, true), coalesce(t.writable, true)
  from (select 1) one
  left join pg_catalog.pg_namespace n on n.nspname = %s
  left join lateral (
       select pg_catalog.bool_and(pg_catalog.pg_has_role(c.relowner, 'USAGE')) as owned,
              pg_catalog.bool_and(pg_catalog.has_table_privilege(c.oid, 'SELECT')
                  and pg_catalog.has_table_privilege(c.oid, 'INSERT')
                  and pg_catalog.has_table_privilege(c.oid, 'UPDATE')
                  and pg_catalog.has_table_privilege(c.oid, 'DELETE')) as writable
         from pg_catalog.pg_class c where c.relnamespace = n.oid and c.relkind = 'r') t on true
"""


def _coordination(state: psycopg.Connection[Any], schema: str, source: str) -> Iterator[Finding]:
    """Whether the schema can be made, brought up to date and written to by this role alone.

    And whether the source's log is there.
    """
    foreign = list(ownership_findings(state, schema))
    yield from foreign
    if any(finding.severity == "error" for finding in foreign):
        return
    row = state.execute(_RIGHTS, (schema,)).fetchone()
    assert row is not None
    role, database, read_only, may_make, there, usable, owned, writable = row
    known = newest()
    found = version(state, schema) if usable else 0  # without the right to look it can't be asked
    who = sql.Identifier(role).as_string(state)
    name = sql.Identifier(schema).as_string(state)
    if read_only:
        yield Finding(
            "coordination_read_only",
            "error",
            f"the coordination database {database} takes no writes: it is a standby, or read-only.",
            "Give the primary's address.",
        )
    if found > known:
        yield Finding(
            "coordination_newer",
            "error",
            f"the coordination schema {schema} is at version {found}, this program knows {known}.",
            "Upgrade cdc_assets here too.",
        )
    elif found and (mark := mark_of(state, source, schema)) is not None:
        error = mark.error(source)
        yield Finding("state_moved", "error", error.what, error.remedy)
    elif 0 < found < known:
        yield Finding(
            "coordination_older",
            "info",
            f"the coordination schema {schema} is at version {found}; the first start makes it"
            f" {known}, and compares what is remembered there.",
            "",
        )
    missing = ""
    if there is None and not may_make:
        missing = f"create schema {name} authorization {who};"
    elif there is not None and found < known and not (usable and there and owned):
        missing = (
            f"alter schema {name} owner to {who};"
            f" do $$ declare t oid; begin for t in select oid from pg_catalog.pg_class"
            f" where relnamespace = {sql.Literal(name).as_string(state)}::regnamespace"
            " and relkind = 'r' loop execute pg_catalog.format"
            f"('alter table %s owner to %I', t::regclass, {sql.Literal(role).as_string(state)});"
            " end loop; end $$;"
        )
    elif found == known and not writable:
        missing = (
            f"grant usage on schema {name} to {who};"
            f" grant select, insert, update, delete on all tables in schema {name} to {who};"
        )
    if missing:
        yield Finding(
            "coordination_schema",
            "error",
            f"the role {role} may not keep its state in the schema {schema} of {database}.",
            f"{missing} -- in {database}; or set state.postgres_url",
        )


def staging(config: SourceConfig, *, leave_nothing: bool = False) -> Iterator[Finding]:
    """Whether staged files can be written, if any are; ``leave_nothing``: the probe is removed."""
    if not config.streams:
        return
    try:
        storage = Storage.of(config.s3)
        if config.log is None:
            check_place(config.staging_uri, config.name, storage, leave_nothing=leave_nothing)
    except StagingProblem as error:
        yield Finding("staging_unwritable", "error", error.what, error.remedy)
    yield from _elsewhere(config)


def _elsewhere(config: SourceConfig) -> Iterator[Finding]:
    """Whether the log goes on where its newest file is: else nobody could read all of it.

    Whoever starts us in another folder has another home there by default.
    """
    places = staged_places(config)
    try:
        with known_log(config) as (store, _):
            newest_file = store.newest_file() if store is not None else None
    except (psycopg.OperationalError, CdcError):  # told elsewhere
        return
    if newest_file is None or staged_place(places, newest_file) is not None:
        return
    folder = newest_file.partition(f"/{config.log_name}/")[0]
    yield Finding(
        "staging_elsewhere",
        "error",
        f"the log's newest staged file is {newest_file}, which isn't below {places[0].uri}: what"
        " is staged here couldn't be merged together with it.",
        f"{at_home(places[0].uri)}If staging.uri was changed, or the files are to be read here:"
        f" staging: {{former_uris: [{json.dumps(folder)}]}}.",
    )
