"""Hundreds of copies are looked at together: a table is, alone, if something has happened to it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cdc_assets.log.copies.chunks import restart_copy
from cdc_assets.log.copies.looks import looks
from cdc_assets.log.states import TableState
from cdc_assets.postgres.names import TableId
from cdc_assets.snapshot import table_copy
from cdc_assets.snapshot.coordinator import copy_tables
from cdc_assets.snapshot.table_copy import TableCopy
from cdc_assets_tests.integration.snapshot.sources import T, chunk_keys
from cdc_assets_tests.support.lake import Lake, NewLake

pytestmark = pytest.mark.spark


def test_a_copy_rests_while_nothing_happens_to_it(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.pin()
    count, store = len(chunk_keys(source)), source.pipeline.store
    copy = TableCopy(source.pipeline, source.session, source.row(T), None, lambda _: None)
    copy.open()

    def rests(*, at_once: bool) -> bool:
        return copy.rests(looks(store, [T]).get(T), at_once=at_once)

    def now(state: str, where: str = "true") -> None:
        source.execute(f"update _pg2iceberg.snapshot_progress set state = '{state}' where {where}")

    (look,) = looks(store, [T]).values()
    assert look.state == TableState.COPYING
    assert (look.unread, look.claimed, look.written) == (count, 0, 0)
    assert rests(at_once=True)
    first = chunk_keys(source)[0]
    assert looks(store, [T], [first])[T].unread == 1
    one = f"chunk = '{first}'"
    now("claimed", one)
    assert rests(at_once=True)
    now("written", one)
    assert rests(at_once=False) and not rests(at_once=True)
    monkeypatch.setattr(table_copy, "COMMIT_SECONDS", 0.0)
    assert not rests(at_once=False)  # it has waited for its commit for long enough
    monkeypatch.undo()
    now("written")
    assert not rests(at_once=False)
    now("landed")
    assert not rests(at_once=False)  # others landed the rest
    now("planned")
    restart_copy(store, source.row(T))
    assert not rests(at_once=False)
    source.execute("delete from _pg2iceberg.tables")
    assert not rests(at_once=False)


def test_tables_that_wait_for_others_cost_a_coordinator_nothing(
    new_lake: NewLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"t{number}" for number in range(12)]
    setup = "; ".join(
        f"create table {name} (id int primary key); insert into {name} values (1)" for name in names
    )
    steps = dict.fromkeys(names, 0)
    step: Callable[..., bool] = TableCopy.step

    def counted(copy: TableCopy) -> bool:
        steps[copy.table.name] += 1
        return step(copy)

    monkeypatch.setattr(TableCopy, "step", counted)
    with new_lake(setup, *names) as lake:
        lake.pin()
        tables = [TableId("public", name) for name in names]
        assert copy_tables(lake.pipeline, lake.session, tables) == {}
    assert {name: count for name, count in steps.items() if count != 1} == {}
