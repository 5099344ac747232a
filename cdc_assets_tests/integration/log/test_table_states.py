"""Everything that sets a table's state, tried in every state."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence

import psycopg
import pytest

from cdc_assets.config.source import parse_config
from cdc_assets.log.asked.wishes import pause
from cdc_assets.log.copies.chunks import await_another_pin, plan_copy, restart_copy
from cdc_assets.log.states import FOLLOWING, TableState
from cdc_assets.log.store import LogStore
from cdc_assets.log.table_row import TableRow
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.catalog import Heap, SourceTable
from cdc_assets.postgres.ctid import CtidRange
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.conftest import NewDatabase

T, RENAMED = TableId("public", "t"), TableId("public", "u")
OID, PIN, AT = 4711, str(uuid.uuid4()), Lsn(100)
CHUNKS = [(Heap(T, OID, 1, 1, is_leaf=False), CtidRange(0, None))]


def _described(name: TableId) -> SourceTable:
    return SourceTable(name, OID, "r", (), (), "d")


# What may set the state of a table, registered or not, and what takes the row that it has.
OF_ANY: Sequence[Callable[[LogStore], object]] = (
    lambda store: store.add_table(_described(T)),
    lambda store: store.add_table(_described(RENAMED)),
    lambda store: store.park_unknown(T, "gone"),
    lambda store: store.note_waiting(T, "a lock"),
    lambda store: store.park(T, "why"),
    lambda store: store.park_log(T, "why", AT),
    lambda store: store.begin_anew(),
    lambda store: pause(store, T),
)
OF_A_ROW: Sequence[Callable[[LogStore, TableRow], object]] = (
    lambda store, row: plan_copy(store, row, PIN, AT, CHUNKS),
    lambda store, row: plan_copy(store, row, PIN, AT, CHUNKS, resumes=True),
    lambda store, row: plan_copy(store, row, PIN, AT, []),
    lambda store, row: plan_copy(store, row, PIN, AT, [], state_without=TableState.COPIED),
    lambda store, row: store.finish_copy(T, row.epoch, AT),
    lambda store, row: store.finish_copy(T, row.epoch, AT, streams=False),
    restart_copy,
    await_another_pin,
)


@pytest.fixture
def store(postgres_dsn: NewDatabase) -> Iterator[LogStore]:
    settings = {"name": "s", "postgres": {"dsn": postgres_dsn()}, "tables": [{"name": "public.t"}]}
    with Pipeline.open(parse_config(settings, "test")) as pipeline:
        yield pipeline.store


def test_a_state_is_followed_by_those_that_it_names_and_by_each_of_them(store: LogStore) -> None:
    found: dict[TableState | None, set[TableState]] = {state: set() for state in FOLLOWING}
    for state in FOLLOWING:
        for oid in (OID, 0):
            for set_any in OF_ANY:
                _place(store.connection, state, oid)
                set_any(store)
                found[state] |= _states(store) - {state}
            for set_row in OF_A_ROW:
                _place(store.connection, state, oid)
                if (row := store.table(T)) is not None:
                    set_row(store, row)
                found[state] |= _states(store) - {state}
    assert found == FOLLOWING


def _states(store: LogStore) -> set[TableState]:
    return {TableState(row.state) for row in store.tables(T)}


def _place(
    connection: psycopg.Connection[tuple[object, ...]], state: TableState | None, oid: int
) -> None:
    """Make the table's row one of ``state``."""
    connection.execute("truncate tables, snapshot_progress, pins cascade")
    connection.execute(
        "insert into pins (pin, source, consistent_point) values (%s, 's', %s)", (PIN, str(AT))
    )
    if state is not None:
        begun = state in ("copying", "streaming", "copied")
        connection.execute(
            "insert into tables (source, table_name, oid, state, key_columns, columns, pin,"
            " snapshot_lsn) values ('s', %s, %s, %s, '{}', '[]', %s, %s)",
            (str(T), oid, state, PIN if state == "copying" else None, str(AT) if begun else None),
        )
