"""Copies whose pins are made by a lock: the lake is the source, whatever is written meanwhile."""

from __future__ import annotations

import itertools
import threading

import psycopg
import pytest

from cdc_assets.log.states import TableState
from cdc_assets.operations.copying import mark_for_copy
from cdc_assets.pins.pins import Pins
from cdc_assets.snapshot.coordinator import copy_table
from cdc_assets_tests.integration.snapshot.sources import WIDE, T, chunk_keys
from cdc_assets_tests.support.lake import Lake, NewLake
from cdc_assets_tests.support.threads import beside
from cdc_assets_tests.support.waiting import wait_for

pytestmark = pytest.mark.spark

SETUP = """
create table t (id int primary key, v text not null);
insert into t select i, 'old ' || i from generate_series(1, 5000) i;
"""


def change(dsn: str, first: int, stop: threading.Event, *, insert_only: bool) -> None:
    with psycopg.connect(dsn, autocommit=True) as session:
        for number in itertools.count(first):
            if stop.is_set():
                return
            session.execute(f"insert into t values ({number}, 'new')".encode())
            if not insert_only:
                some = number * 7919 % 5000
                session.execute(f"update t set v = v || ' {some}' where id = {some}".encode())
                session.execute(f"delete from t where id = {some + 1}".encode())


def pinned(source: Lake) -> bool:
    source.pins.tick()
    return source.row(T).state == TableState.COPYING


@pytest.mark.parametrize("mode", ["mirror", "append"])
def test_invariant_5_a_copy_under_traffic_is_the_source(new_lake: NewLake, mode: str) -> None:
    """In append mode what is in both copy and log would be twice, what is in neither missing."""
    with new_lake(SETUP, {"name": "t", "mode": mode}, snapshot={"pin": "lock"}) as source:
        source.pin()
        dsn, append = source.pipeline.source_dsn, mode == "append"
        with (
            beside(lambda stop: change(dsn, 100_000, stop, insert_only=append)),
            beside(lambda stop: change(dsn, 500_000, stop, insert_only=append)),
        ):
            mark_for_copy(source.pipeline, [T])
            wait_for(lambda: pinned(source))
            assert source.row(T).epoch == 2
            source.copy()
        source.catch_up()
        if append:
            assert sorted(row[0] for row in source.rows(T)) == [
                number for (number,) in source.execute("select id from t order by 1")
            ]
        else:
            assert source.equal(T)
            assert [found.equal for found in source.verify()] == [True]


def test_a_copy_goes_on_under_another_pin_by_lock(new_lake: NewLake) -> None:
    """Its first one came from the slot; no other slot can be made."""
    tables = {"name": "t", "chunk_pages": 4}
    with new_lake(WIDE, tables, snapshot={"pin": "lock"}) as source:
        source.pin()
        first = source.row(T)
        copy_table(source.pipeline, source.session, T, only=chunk_keys(source)[:3])
        source.execute("update t set v = 'moved' where id % 3 = 0")
        source.pins.close()
        source.pins = Pins(source.pipeline)
        with psycopg.connect(source.pipeline.source_dsn) as stranger:
            stranger.execute("select txid_current()")
            wait_for(lambda: pinned(source) and source.row(T).pin != first.pin)
        assert (source.row(T).epoch, source.row(T).snapshot_lsn) == (1, first.snapshot_lsn)
        source.copy()
        source.catch_up()
        source.catch_up()
        assert source.equal(T)
