"""A lake table that is there already is taken over without a copy, and equals the source."""

from __future__ import annotations

import threading

import psycopg
import pytest

from cdc_assets.errors import TableProblem
from cdc_assets.lake.adopted import taking
from cdc_assets.maintenance.run import maintain
from cdc_assets.operations.copying import mark_for_copy
from cdc_assets_tests.integration.lake.adopted.adopting import (
    SETUP,
    T,
    asks,
    begin,
    by_pyiceberg,
    consistent,
    equal,
    filled,
    info,
    loaded,
    made,
)
from cdc_assets_tests.support.lake import Lake, NewLake

pytestmark = pytest.mark.spark


def change(source: Lake) -> None:
    source.execute("update t set v = 'later' where id % 7 = 0; delete from t where id % 11 = 0")
    source.execute("insert into t (v, n) values ('new', 1.5)")


@pytest.mark.parametrize("tool", ["Spark SQL", "pyiceberg"])
def test_a_table_with_a_position_goes_on_from_there(new_lake: NewLake, tool: str) -> None:
    """Under traffic, from before the other tool reads to after the adoption."""
    with new_lake(SETUP, {"name": "t", "adopt": {"wait": True}}) as source:
        begin(source)
        stop = threading.Event()

        def write() -> None:
            with psycopg.connect(source.pipeline.source_dsn, autocommit=True) as client:
                for number in range(10_000):
                    if stop.wait(0.01):
                        return
                    client.execute("insert into t (v, n) values ('traffic', 1)")
                    client.execute("update t set n = n + 1 where id = %s", (1 + number % 40,))
                    client.execute("delete from t where id = %s", (number - 40,))

        traffic = threading.Thread(target=write)
        traffic.start()
        try:
            lsn, rows = consistent(source)
            if tool == "pyiceberg":
                by_pyiceberg(source, rows)
            else:
                made(source)
                filled(source, rows)
            source.flush()
            before = loaded(source).metadata_location
            with pytest.raises(TableProblem, match="adoption waits for a position"):
                source.drain(T)
            [done] = maintain(source.pipeline, lambda: source.session, [T])
            assert done.left_alone == "it isn't adopted yet"
            assert loaded(source).metadata_location == before
            assert "waits to be adopted" in info(source)
            asks(source, {"lsn": str(lsn)})
            source.catch_up()
        finally:
            stop.set()
            traffic.join()
        change(source)
        source.catch_up()
        assert equal(source)
        assert source.execute("select 1 from t where v = 'traffic'")
        assert "was adopted" in info(source)
        assert [one.equal for one in source.verify()] == [True]
        assert info(source) == ""
        [done] = maintain(source.pipeline, lambda: source.session, [T])
        assert (done.problem, done.left_alone) == (None, None)
        change(source)
        source.catch_up()
        assert equal(source)


def test_what_was_missed_is_found_where_no_position_is_known(new_lake: NewLake) -> None:
    with new_lake(SETUP, {"name": "t", "adopt": True}) as source:
        rows = source.execute("select id, v, n from t")
        made(source)
        filled(source, [*rows[5:], (1000, "only here", 1)])
        source.execute("update t set v = 'missed' where id in (10, 20)")
        begin(source)
        change(source)
        source.flush()
        with pytest.raises(TableProblem, match=r"adopted without a position.* --repair"):
            source.drain(T)
        assert "was adopted" in info(source)
        assert not equal(source)
        assert [one.equal for one in source.verify()] == [False]
        assert "was adopted" in info(source)
        assert [one.equal for one in source.verify(repair=True)] == [True]
        assert info(source) == ""
        assert equal(source)
        change(source)
        source.catch_up()
        assert equal(source)


def test_a_table_of_an_earlier_install_whose_state_was_lost(
    copied_lake: NewLake, new_lake: NewLake
) -> None:
    """Its cursors are those of another log, though of the same epoch."""
    with copied_lake(SETUP, "t") as source:
        change(source)
        source.catch_up()
        names = (
            "select relname from pg_class where relkind = 'r' and relname not like 'iceberg%'"
            " and relnamespace = '_pg2iceberg'::regnamespace and relname <> 'schema_version'"
        )
        tables = ", ".join(f"_pg2iceberg.{name}" for (name,) in source.execute(names))
        source.pins.close()
        source.execute(f"truncate {tables}")
        source.execute("select pg_drop_replication_slot('cdc_src')")
        source.execute("update t set v = 'in no log' where id = 4")
        earlier = loaded(source).metadata.current_snapshot_id
        asks(source, True)
        again = Lake(source.config, source.source)
        try:
            begin(again)
            change(again)
            again.flush()
            with pytest.raises(TableProblem, match="without a position"):
                again.drain(T)
            known = {snapshot.snapshot_id for snapshot in loaded(again).metadata.snapshots}
            assert earlier in known
            assert [one.equal for one in again.verify(repair=True)] == [True]
            change(again)
            again.catch_up()
            assert equal(again)
        finally:
            again.close()


def test_what_the_table_has_already_is_not_applied(new_lake: NewLake) -> None:
    """Without a key each change would be there twice."""
    keyless = SETUP.replace(" primary key", "") + "alter table t replica identity full"
    with new_lake(keyless, {"name": "t", "adopt": {"wait": True}}) as source:
        begin(source)
        change(source)
        source.flush()
        lsn, rows = consistent(source)
        by_pyiceberg(source, rows)
        asks(source, {"lsn": str(lsn)})
        source.execute("insert into t (v, n) values ('after it', 3)")
        source.catch_up()
        assert equal(source)
        assert [one.equal for one in source.verify()] == [True]


def test_it_is_adopted_once(new_lake: NewLake) -> None:
    """A process that dies after the commit does it once more, and no change is applied twice."""
    with new_lake(SETUP, {"name": "t", "adopt": {"wait": True}}) as source:
        begin(source)
        lsn, rows = consistent(source)
        made(source)
        filled(source, rows)
        asks(source, {"lsn": str(lsn)})
        change(source)
        source.flush()
        source.drain(T)
        source.execute(
            "update _pg2iceberg.pipeline_meta"
            " set value = replace(value, 'unverified', 'awaited') where key like 'adopted:%'"
        )
        change(source)
        source.catch_up()
        assert equal(source)


def test_resync_copies_it(new_lake: NewLake) -> None:
    with new_lake(SETUP, {"name": "t", "adopt": True}) as source:
        made(source)
        begin(source)
        source.flush()
        with pytest.raises(TableProblem, match="without a position"):
            source.drain(T)
        mark_for_copy(source.pipeline, [T])
        source.pin()
        source.copy()
        change(source)
        source.catch_up()
        assert equal(source)
        assert info(source) == ""


def test_a_mark_of_ours_is_a_position(new_lake: NewLake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two installs: the table is handed over from one log to another one."""
    with new_lake(SETUP, {"name": "t", "adopt": {"wait": True}}) as source:
        begin(source)
        lsn, rows = consistent(source)
        made(source)
        filled(source, rows)
        asks(source, {"mark": "end"})
        before = loaded(source).metadata_location
        with pytest.raises(TableProblem, match="no tag mark_end"):
            source.drain(T)
        assert loaded(source).metadata_location == before
        source.session.sql("alter table lake.src.t create tag mark_end")
        with pytest.raises(TableProblem, match="says an LSN"):
            source.drain(T)
        writer = source.session.table("lake.src.t").limit(0).writeTo("lake.src.t")
        for key, value in {"cdc.offset": "5", "cdc.applied-lsn": str(lsn)}.items():
            writer = writer.option(f"snapshot-property.{key}", value)
        writer.append()
        source.session.sql("alter table lake.src.t create or replace tag mark_end")
        change(source)
        source.flush()
        with monkeypatch.context() as patched:
            patched.setattr(taking, "listed", lambda _: 1 / 0)  # it dies after its commit
            with pytest.raises(ZeroDivisionError):
                source.drain(T)
        source.drain(T)
        assert equal(source)
        assert "was adopted" in info(source)
