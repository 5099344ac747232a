"""Changing a publication: tables are added to it, and withdrawn."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

import psycopg

from cdc_assets.errors import PreflightError, TableProblem, first_line
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.publication.contents import (
    inserts_publication,
    published_tables,
    row_filters,
)
from cdc_assets.postgres.publication.identity import remedy, sentence, unidentified
from cdc_assets.postgres.publication.row_filters import is_published
from cdc_assets.postgres.publication.statements import (
    addition,
    creation,
    pasted,
    placement,
    removal,
)
from cdc_assets.postgres.session.connect import Connection


@dataclass(frozen=True, slots=True)
class Publishing:
    """The tables that couldn't be published, or withdrawn; all others were.

    ``refused``: with the reason and the way out. ``busy``: a foreign lock is in the way, and
    another try may help.
    """

    refused: Mapping[TableId, str]
    busy: frozenset[TableId] = frozenset()


def publish(
    connection: Connection,
    publication: str,
    tables: Iterable[TableId],
    *,
    beside: str | None = None,
    filters: Mapping[TableId, str] = MappingProxyType({}),
    settled: Collection[TableId] = (),
) -> Publishing:
    """Create the publication if it is missing, and add the tables that it lacks.

    A table that is in the other publication leaves it, and keeps its column list: the server ends a
    stream with two lists of a table. ``beside``: ``publication`` is the one of inserts beside that
    one, and publishes neither UPDATE nor DELETE, so Postgres refuses none. Otherwise a table is
    refused here if Postgres would refuse its changes. One that is there with another row filter
    than ``filters`` has is added again, unless it is ``settled``: its log goes on. Raises
    PreflightError if the publication is missing and can't be made.
    """
    other = beside or inserts_publication(publication)
    present = published_tables(connection, publication)
    tables = set(tables)
    fresh = {t: oid for t, oid in (present or {}).items() if t in tables - {*settled}}
    wrong = _filtered_otherwise(connection, publication, fresh, filters)
    missing = sorted((tables - (present or {}).keys()) | wrong)
    where = {table: filters[table] for table in missing if table in filters}
    if present is None:
        _create(connection, publication, missing, where, beside=beside)
    if not missing:
        return Publishing({})
    try:
        _add(connection, publication, missing, other, where, wrong, inserts_only=beside is not None)
    except (TableProblem, *_IN_THE_WAY, *_REFUSALS):
        pass  # one of them is to blame: each is tried alone
    else:
        return Publishing({})
    refused, busy = dict[TableId, str](), set[TableId]()
    for table in missing:
        statements = placement(connection, publication, [table], other, where, wrong)
        try:
            _add(
                connection,
                publication,
                [table],
                other,
                where,
                wrong,
                inserts_only=beside is not None,
            )
        except _IN_THE_WAY:
            busy.add(table)
        except TableProblem as problem:
            refused[table] = f"{problem.what}. {problem.remedy}"
        except _REFUSALS as error:
            if table in where and not isinstance(error, _NOT_OF_FILTERS):
                refused[table] = (
                    f"Postgres refuses where: {where[table]} ({first_line(error)}). Correct it: a"
                    " publication's row filter has columns, constants and immutable functions of"
                    " Postgres's own"
                )
                continue
            refused[table] = (
                f"it can't be added to the publication {publication} ({first_line(error)})."
                f" An owner of all runs{_where(error)}: {pasted(statements)}"
            )
    return Publishing(refused, frozenset(busy))


def _filtered_otherwise(
    connection: Connection,
    publication: str,
    present: Mapping[TableId, int],
    filters: Mapping[TableId, str],
) -> set[TableId]:
    """Those of the tables (with oids) that the publication has with another filter, or none."""
    found = row_filters(connection, publication, [*present.values()])
    return {
        table
        for table, oid in present.items()
        if not is_published(connection, table, filters.get(table), found.get(oid))
    }


def withdraw(connection: Connection, publication: str, tables: Iterable[TableId]) -> Publishing:
    """Take tables out of the publication, one by one."""
    refused, busy = dict[TableId, str](), set[TableId]()
    for table in tables:
        statement = removal(connection, publication, [table])
        try:
            with _briefly(connection, _LOCK_TIMEOUT):
                connection.execute(statement.encode())
        except _IN_THE_WAY:
            busy.add(table)
        except _REFUSALS as error:
            refused[table] = (
                f"it can't be taken out of the publication {publication} ({first_line(error)})."
                f" An owner of it runs{_where(error)}: {statement};"
            )
    return Publishing(refused, frozenset(busy))


def _where(error: psycopg.Error) -> str:
    """Of a statement that was refused here."""
    read_only = isinstance(error, psycopg.errors.ReadOnlySqlTransaction)
    return " on the primary" if read_only else ""


# Errors about one table, a standby, the role's rights, or a publication of all tables, which can't
# be altered table by table: another try changes nothing.
_REFUSALS = (
    psycopg.NotSupportedError,
    psycopg.errors.ReadOnlySqlTransaction,
    psycopg.ProgrammingError,
    psycopg.DataError,
    psycopg.errors.ObjectNotInPrerequisiteState,
)
_NOT_OF_FILTERS = (
    psycopg.errors.InsufficientPrivilege,
    psycopg.errors.ReadOnlySqlTransaction,
    psycopg.errors.ObjectNotInPrerequisiteState,
    psycopg.errors.UndefinedObject,
)
_IN_THE_WAY = (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected)
# ALTER PUBLICATION waits for VACUUM and DDL of the table; meanwhile other DDL waits behind it
# (reads and writes don't). After a second (deadlock_timeout) the server ends an autovacuum that is
# in the way, which may otherwise take hours; so the time-out is a little longer.
_LOCK_TIMEOUT = "1500ms"
# Foreign DDL that waits for a table we have locked, and holds the one we wait for, fails by a
# deadlock after that second: a transaction that locks many tables waits much less.
_LOCK_TIMEOUT_OF_MANY = "100ms"


@contextmanager
def _briefly(connection: Connection, lock_timeout: str) -> Iterator[None]:
    """A transaction that gives up (one of _IN_THE_WAY) rather than wait for a lock."""
    with connection.transaction():
        connection.execute(
            "select pg_catalog.set_config('lock_timeout', %s, true)", (lock_timeout,)
        )
        yield


def _create(
    connection: Connection,
    publication: str,
    tables: Sequence[TableId],
    filters: Mapping[TableId, str],
    *,
    beside: str | None,
) -> None:
    statement = creation(connection, publication, beside=beside)
    try:
        connection.execute(statement.encode())
    except (
        psycopg.errors.InsufficientPrivilege,
        psycopg.errors.ReadOnlySqlTransaction,
    ) as error:
        statements = [statement]
        if tables:
            statements.append(addition(connection, publication, tables, filters=filters))
        raise PreflightError(
            f"the role can't create the publication {publication}: {first_line(error)}.",
            f"An owner of the tables runs{_where(error)}: {pasted(statements)}",
        ) from error


def _add(
    connection: Connection,
    publication: str,
    tables: Sequence[TableId],
    other: str,
    filters: Mapping[TableId, str],
    replaced: Collection[TableId],
    *,
    inserts_only: bool,
) -> None:
    """Add tables, all or none; raises TableProblem for one that Postgres would then refuse.

    ALTER PUBLICATION locks the table against being altered, and takes effect at its commit: the
    table is published exactly as it is judged under that lock.
    """
    with _briefly(connection, _LOCK_TIMEOUT if len(tables) == 1 else _LOCK_TIMEOUT_OF_MANY):
        for statement in placement(connection, publication, tables, other, filters, replaced):
            connection.execute(statement.encode())
        if inserts_only:
            return
        present = published_tables(connection, publication) or {}
        found = unidentified(connection, publication, [present[table] for table in tables])
        for table in tables:
            if wrong := found.get(present[table]):
                raise TableProblem(table, sentence(table, wrong), remedy(wrong))
