"""Moving a source's state, which is its log and all that is known of it, to another database.

Nothing else works meanwhile: the flusher's turn, and every other lock of the source, is taken or
waited for. Then, each step committed before the next one begins:

1. The old rows are frozen: a mark keeps sessions out that come from now on, constraints keep all
   others from writing, and the sessions that are there are ended.
2. The new schema gets a mark, too: ``arriving``.
3. The rows are copied there, in one transaction, and compared.
4. In one transaction the old rows are deleted, and the old mark says where the log is now.
5. The new mark is removed: the log lives there.

Killed before 4, the old rows are all there, and nobody works with them until the same command is
run again, or ``undo``. Killed after it, the new ones are, and the same command does 5. So no moment
has two logs that live (invariants 1 and 9): each of them has a mark until the other one is gone.

While a table is copied under a snapshot, that is refused: sessions of the processes that have to
end hold it, so the copy would lose it, and begin anew or go on under another pin. ``during_copies``
says that this is meant. Copies without a snapshot of their own (``incremental``) just go on.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import psycopg

from cdc_assets.config.addresses import coordination_dsn
from cdc_assets.config.reading.expansion import expanded
from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.errors import ConfigurationError, CoordinationError, PreflightError
from cdc_assets.log.locks import (
    ALONE_LOCK,
    CATALOG_LOCK,
    HEAPS_LOCK,
    PINS_LOCK,
    flusher_lock,
    write_lock,
)
from cdc_assets.log.moving.frozen import end_sessions, freeze, thaw
from cdc_assets.log.moving.mark import Mark, Move, mark_of, place_of, remove_mark, set_mark
from cdc_assets.log.moving.rows import copy_rows, has_rows, remove_rows
from cdc_assets.log.sessions.flusher_status import active_flusher
from cdc_assets.log.store import LogStore
from cdc_assets.operations.state.target import refuse_target, refuse_without_catalog
from cdc_assets.postgres.slots import system_identifier
from cdc_assets.readiness.surroundings import SKEW_SECONDS
from cdc_assets.relay.first import refuse_shared_log

# For a merge or a run to end, whose lock is waited for; and for sessions that are ended.
PATIENCE_SECONDS = 30.0
_END_SECONDS = 10.0
_LOOK_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Migrated:
    """What was done, from ``former`` to ``place``; ``rows`` by table of the schema.

    ``outcome`` is ``was moved`` if an earlier call had done it all; ``undone`` goes with no place.
    """

    source: str
    outcome: Literal["moved", "was moved", "undone", "nothing to undo"]
    former: str
    place: str | None = None
    rows: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


def at_another_place(config: SourceConfig, dsn: str) -> SourceConfig:
    """``config`` with its state at ``dsn``, which may have references as the file may.

    Raises ConfigurationError, without the address, if it isn't one.
    """
    try:
        if not (address := expanded(dsn).strip()):  # libpq would take one from its defaults
            raise ValueError("no address")
    except ValueError as error:
        raise ConfigurationError(f"--to: {error}.") from None
    data = json.loads(config.dump())
    data["state"] = {**(data.get("state") or {}), "postgres_url": address}
    return parse_config(data, "--to", expanded=True)


def migrate_state(config: SourceConfig, dsn: str, *, during_copies: bool = False) -> Migrated:
    """Move the state of ``config``'s source to the database at ``dsn``, or go on with that.

    Raises ConfigurationError, PreflightError, CoordinationError or psycopg.Error; all is as it was
    then, unless the old database is what fails.
    """
    began = time.monotonic()
    target = at_another_place(config, dsn)
    refuse_without_catalog(config)
    with _opened(config) as old:
        refuse_shared_log(config, old)
        refuse_target(target)
        with _opened(target) as new:
            former, place = (place_of(s.connection, s.schema) for s in (old, new))
            if _identity(old) == _identity(new):
                raise ConfigurationError(f"--to is where the state of {config.name} is: {place}.")
            _take_turn(old)
            mark = _mark(old)
            if mark is not None and mark.move != Move.LEAVING:
                done = _finish(mark, new, place)
                return Migrated(config.name, done, former, place)
            _take_turn(new)
            _refuse_known(new, former)
            _refuse_other_clock(old, new)
            if not during_copies:
                _refuse_copies(old)
            number = secrets.token_hex(8)
            _freeze(old, place, number)
            try:
                _receive(new, former, number)
                rows = _copy(old, new)
            except BaseException:
                _unfreeze(old)  # nothing went: whoever can't end the move isn't kept from working
                raise
            _leave(old, place, number)
            _arrive(new)
    return Migrated(config.name, "moved", former, place, rows, time.monotonic() - began)


def undo_migration(config: SourceConfig) -> Migrated:
    """Let the source be worked with where it is, if a move of it was interrupted before its end."""
    with _opened(config) as old:
        _take_turn(old)
        mark, here = _mark(old), place_of(old.connection, old.schema)
        if mark is None:
            return Migrated(config.name, "nothing to undo", here)
        if mark.move != Move.LEAVING:
            raise mark.error(config.name)
        _unfreeze(old)
    return Migrated(config.name, "undone", here)


@contextmanager
def _opened(config: SourceConfig) -> Iterator[LogStore]:
    schema = config.state.schema_
    store = LogStore.open(coordination_dsn(config), config.name, schema, moves=True)
    try:
        yield store
    finally:
        store.close()


def _mark(store: LogStore) -> Mark | None:
    return mark_of(store.connection, store.source, store.schema)


def _identity(store: LogStore) -> tuple[object, ...]:
    """What no other coordination schema has in common with this one."""
    row = store.connection.execute(
        "select d.oid, n.oid from pg_catalog.pg_database d, pg_catalog.pg_namespace n"
        " where d.datname = pg_catalog.current_database() and n.nspname = %s",
        (store.schema,),
    ).fetchone()
    assert row is not None
    return (system_identifier(store.connection), *row)


# --- may it begin? ---


def _take_turn(store: LogStore) -> None:
    """Have every lock of the source, and wait for those of runs.

    Raises PreflightError if something still has one after PATIENCE_SECONDS.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    if not store.lock_within(flusher_lock(store.source), PATIENCE_SECONDS):
        raise PreflightError(
            f"a flusher of source {store.source} is active"
            f" ({active_flusher(store) or 'another one each time'}).",
            "Stop what runs it (Dagster's code server, cdc-assets flush, its container) and all"
            " other processes of the source; then try again.",
        )
    names = [PINS_LOCK, HEAPS_LOCK, CATALOG_LOCK, ALONE_LOCK]
    names += [write_lock(row.table) for row in store.tables()]
    store.lock_some_within(names, max(0.0, deadline - time.monotonic()))
    while held := _held_by_others(store):
        if time.monotonic() > deadline:
            raise PreflightError(
                f"something works with source {store.source} still: {', '.join(held)}.",
                "Stop it, or wait until it has ended; then try again.",
            )
        time.sleep(_LOOK_SECONDS)


def _held_by_others(store: LogStore) -> list[str]:
    """The locks that others have, with the backend of each."""
    me = store.connection.info.backend_pid
    names = store.connection.execute(
        "select name from locks where source = %s and pid <> %s and life is not null order by 1",
        (store.source, me),
    ).fetchall()
    held = ((str(name), store.lock_holder(str(name))) for (name,) in names)
    return [f"{name} (session {pid})" for name, pid in held if pid not in (None, me)]


def _refuse_known(new: LogStore, former: str) -> None:
    mark = _mark(new)
    if mark is not None and mark.move == Move.ARRIVING and mark.place != former:
        raise mark.error(new.source)
    if mark is not None and mark.move == Move.LEAVING:
        raise mark.error(new.source)
    if mark is None and has_rows(new.connection, new.source, new.schema):
        raise PreflightError(
            f"there is a log of a source {new.source} already at"
            f" {place_of(new.connection, new.schema)}.",
            "Give another database; or, if nothing needs that one any more, delete its rows there.",
        )


def _refuse_other_clock(old: LogStore, new: LogStore) -> None:
    apart = abs((old.server_now() - new.server_now()).total_seconds())
    if apart > SKEW_SECONDS:
        raise PreflightError(
            f"the clocks of the two coordination servers are {apart:.0f} s apart: ages and graces"
            " would be wrong by that.",
            "Have both hosts synchronize their clocks (chrony, NTP).",
        )


def _refuse_copies(old: LogStore) -> None:
    copied = old.connection.execute(
        "select t.table_name from tables t join pins p using (pin)"
        " where t.source = %s and t.state = 'copying' and p.held order by 1",
        (old.source,),
    ).fetchall()
    if copied:
        raise PreflightError(
            f"tables are being copied under a snapshot: {', '.join(name for (name,) in copied)}.",
            "Let the copies end first; or have them lose it, and be copied anew as far as that"
            " takes, with --during-copies.",
        )


# --- the steps ---


def _freeze(old: LogStore, place: str, number: str) -> None:
    try:
        set_mark(old.connection, old.source, Move.LEAVING, place, number)
        freeze(old.connection, old.source, old.schema)
        end_sessions(old.connection, old.source, _END_SECONDS)
    except (psycopg.errors.InsufficientPrivilege, psycopg.errors.LockNotAvailable) as error:
        _unfreeze(old)
        raise CoordinationError(
            f"the rows of source {old.source} can't be frozen: {error.diag.message_primary}.",
            "Connect as the owner of the schema's tables; or try again when nothing locks them.",
        ) from error
    except CoordinationError:
        _unfreeze(old)
        raise


def _unfreeze(old: LogStore) -> None:
    thaw(old.connection, old.source, old.schema)
    remove_mark(old.connection, old.source)  # last: until then nobody comes


def _receive(new: LogStore, former: str, number: str) -> None:
    set_mark(new.connection, new.source, Move.ARRIVING, former, number)
    thaw(new.connection, new.source, new.schema)  # of a source that comes back
    end_sessions(new.connection, new.source, _END_SECONDS)


def _copy(old: LogStore, new: LogStore) -> dict[str, int]:
    with old.connection.transaction(), new.connection.transaction():
        old.connection.execute("set transaction isolation level repeatable read")
        remove_rows(new.connection, new.source, new.schema)  # of a move that was interrupted
        return copy_rows(old.connection, new.connection, old.source, old.schema)


def _leave(old: LogStore, place: str, number: str) -> None:
    with old.connection.transaction():
        remove_rows(old.connection, old.source, old.schema)
        set_mark(old.connection, old.source, Move.GONE, place, number)


def _arrive(new: LogStore) -> None:
    remove_mark(new.connection, new.source)


def _finish(mark: Mark, new: LogStore, place: str) -> Literal["moved", "was moved"]:
    """Do what is left to do once the old rows are gone."""
    found = _mark(new)
    if found is None and mark.move == Move.GONE and mark.place == place:
        if has_rows(new.connection, new.source, new.schema):
            return "was moved"
        raise CoordinationError(
            f"the state of source {new.source} was moved to {place}, and nothing of it is there.",
            "Restore that database from a backup.",
        )
    # What a move left behind that was given up, for one to elsewhere, has another number.
    ends = found is not None and found.move == Move.ARRIVING and found.number == mark.number
    if mark.move != Move.GONE or not ends:
        raise mark.error(new.source)
    _arrive(new)
    return "moved"
