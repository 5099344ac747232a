"""A second lake from one log: copied from the source, and equal to it at the end."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest

from cdc_assets.errors import TableProblem
from cdc_assets.flusher.flusher import run
from cdc_assets.log.states import TableState
from cdc_assets.operations.copying import mark_for_copy
from cdc_assets.operations.drop_table import drop_table
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support.lake import Lake, NewLake
from cdc_assets_tests.support.second import GROUP, SecondLake, begin, second_config, second_lake
from cdc_assets_tests.support.threads import beside

pytestmark = pytest.mark.spark

T, U = TableId("public", "t"), TableId("public", "u")
SETUP = """
create table t (id int primary key, v text, large text);
alter table t alter column large set storage external;
insert into t select i, 'v' || i, repeat(md5(i::text), 200) from generate_series(1, 300) i;
create table u (id int primary key, n numeric(12, 2));
insert into u select i, i / 4.0 from generate_series(1, 100) i;
"""
# Updates that leave large values out, and some that don't; keys that move; deletes.
TRAFFIC = (
    "update t set v = v || 'x' where id % 7 = {n} % 7",
    "update t set large = repeat(md5(random()::text), 200) where id % 31 = {n} % 31",
    "delete from t where id % 53 = {n} % 53",
    "insert into t select 1000 * {n} + i, 'new', repeat('y', 3000) from generate_series(1, 9) i",
    "update t set id = -id - 100000 * {n} where id between 100 and 102",
    "update u set n = n + 1 where id % 5 = {n} % 5",
)


@contextmanager
def traffic(source: Lake) -> Iterator[None]:
    """Somebody writes all the time."""

    def write(stop: threading.Event) -> None:
        dsn = source.config.postgres.dsn
        assert dsn is not None
        with psycopg.connect(dsn.get_secret_value(), autocommit=True) as client:
            for number in itertools.count(1):
                for statement in TRAFFIC:
                    client.execute(statement.format(n=number).encode())
                if stop.wait(0.2):
                    return

    with beside(write):
        yield


def catch_up(first: Lake, second: Lake) -> None:
    first.catch_up()
    second.catch_up()


def are_equal(*lakes: Lake) -> bool:
    return all(lake.equal(table) for lake in lakes for table in lake.tables)


def test_under_traffic(copied_lake: NewLake) -> None:
    with copied_lake(SETUP, "t", "u") as first, second_lake(first, pinned=False) as second:
        with traffic(first):
            first.catch_up()
            second.pins.prepare()
            second.pins.tick()
            first.catch_up()
            second.copy()
            catch_up(first, second)
        catch_up(first, second)
        assert are_equal(first, second)
        first.execute("alter table t add column w int default 7; insert into t values (-1, 'a')")
        first.execute("truncate u; insert into u values (1, 1.5)")
        first.execute("alter table t drop column v; alter table u rename column n to m")
        first.execute("update t set w = 8 where id % 2 = 0")
        catch_up(first, second)
        assert [compared.outcome for compared in first.verify()] == ["equal", "equal"]
        assert [compared.outcome for compared in second.verify()] == ["equal", "equal"]


def test_either_is_copied_anew(copied_lake: NewLake) -> None:
    with copied_lake(SETUP, "t", "u") as first, second_lake(first) as second:
        mark_for_copy(second.pipeline, [T])
        first.execute("update t set v = 'one' where id < 9")
        first.flush()
        begin(second)
        catch_up(first, second)
        assert are_equal(first, second)
        assert first.row(T).epoch == 1

        mark_for_copy(first.pipeline, [T])
        first.execute("update t set v = 'two' where id < 9; delete from u where id < 9")
        first.pin()
        first.copy()
        first.flush()
        second.flush()
        assert second.row(T).state == TableState.WAITING
        second.drain(U)
        assert second.equal(U)
        begin(second)
        first.execute("update t set v = 'three' where id < 5")
        catch_up(first, second)
        assert are_equal(first, second)
        assert (first.row(T).epoch, second.row(T).epoch) == (2, 3)


def test_modes_names_and_types_are_its_own(copied_lake: NewLake) -> None:
    history = [{"name": "t", "mode": "soft_delete", "as": "kept"}, {"name": "u", "mode": "append"}]
    with copied_lake(SETUP, "t", "u") as first, second_lake(first, tables=history) as second:
        first.execute("delete from t where id < 9; update u set n = 1 where id < 4")
        catch_up(first, second)
        assert first.equal(T)
        kept = second.session.table(second.lake_table(T).sql_name)
        assert second.lake_table(T).name == "kept"
        assert kept.where("_deleted_at is not null").count() == 8
        assert (
            kept.where("_deleted_at is null").count()
            == first.session.table(first.lake_table(T).sql_name).count()
        )
        ops = second.session.table(second.lake_table(U).sql_name).groupBy("_op").count().collect()
        assert {row["_op"]: row["count"] for row in ops} == {"I": 100, "U": 3}


def test_the_first_one_s_lake_tables_aren_t_touched(copied_lake: NewLake) -> None:
    with copied_lake(SETUP, "t", "u") as first:
        lake = {**first.config.lake.model_dump(mode="json"), "namespace": first.config.namespace}
        lake["catalog"]["warehouse"] = first.config.warehouse
        with second_lake(first, pinned=False, lake=lake) as second:
            second.pins.prepare()
            second.pins.tick()
            with pytest.raises(TableProblem, match="wasn't made from it by this source"):
                second.copy()
        first.catch_up()
        assert are_equal(first)


def test_tables_are_given_up_in_either(copied_lake: NewLake) -> None:
    with copied_lake(SETUP, "t", "u") as first, second_lake(first) as second:
        fewer = SecondLake(first, second_config(first.config, tables=[{"name": "u"}]))
        drop_table(fewer.pipeline, T)
        assert second.row(T).oid == 0
        held = "select table_name from _pg2iceberg.mat_cursor where consumer_group = %s"
        assert first.source.execute(held, [GROUP]).fetchall() == [("public.u",)]
        first.execute("update t set v = 'x'; update u set n = 2")
        first.catch_up()
        fewer.catch_up(U)
        assert are_equal(first)
        assert fewer.equal(U)

        less = first.config.model_copy(update={"tables": (first.config.table(T),)})
        alone = Lake(less, first.source)
        drop_table(alone.pipeline, U)
        alone.flush()
        run(fewer.config, until=alone.pipeline.store.flushed_lsn())
        alone.close()
        row = fewer.row(U)
        assert row.state == TableState.WAITING
        assert row.reason is not None
        assert "doesn't replicate it" in row.reason
        assert first.source.execute(held, [GROUP]).fetchall() == []
        fewer.close()


def test_masks_and_filters_of_both(copied_lake: NewLake) -> None:
    masked = {"name": "t", "columns": {"mask": {"v": "redact"}, "exclude": ["large"]}}
    with (
        copied_lake(SETUP, masked, {"name": "u", "where": "id <= 50"}) as first,
        second_lake(first) as second,
    ):
        first.execute("update t set v = 'secret' where id < 9; insert into u values (-1, 2)")
        first.execute("update u set n = 9 where id in (20, 60)")
        catch_up(first, second)
        for table in (T, U):
            assert first.rows(table) == second.rows(table)
        assert len(second.rows(U)) == 51
        assert "secret" not in str(second.rows(T))
