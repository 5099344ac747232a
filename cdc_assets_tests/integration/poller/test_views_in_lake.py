"""Views and foreign tables from the source to the lake: copy, polls, merges, deletes."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pytest
from psycopg import sql

from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.log.states import TableState
from cdc_assets.postgres.key_lookup import key_columns, lookups
from cdc_assets_tests.conftest import databases
from cdc_assets_tests.integration.poller.test_lake import copied, in_lake, look_for_deletes
from cdc_assets_tests.integration.poller.test_views import JOINED, LAGGING, OF_W, W
from cdc_assets_tests.support.foreign import REMOTE, foreign
from cdc_assets_tests.support.lake import Lake, NewLake, lake

pytestmark = pytest.mark.spark

QUERY = {"every": "1s"}
COLUMNS = ("id", "v", "name")
ROWS = "select i, 'old ' || i, now() - interval '1 day' from generate_series(1, 300) i"


def is_equal(source: Lake, *columns: str) -> bool:
    """But for times, which Spark and psycopg have in two ways."""
    there = source.execute(f"select {', '.join(columns)} from w")
    return in_lake(source, W, *columns) == sorted(there)


def test_a_view_is_copied_followed_altered_and_relieved_of_deleted_rows(new_lake: NewLake) -> None:
    made = f"{JOINED} insert into t {ROWS}; insert into owner values (7, 'seven')"
    with new_lake(made, OF_W, query=QUERY) as source:
        copied(source)
        assert is_equal(source, *COLUMNS)
        source.execute("update owner set name = 'eight', updated_at = now()")
        source.execute("insert into t values (1000, 'new')")
        source.execute("delete from t where id between 100 and 150")
        source.catch_up()
        assert len(source.rows(W)) == 301
        look_for_deletes(source, W)
        assert is_equal(source, *COLUMNS)

        source.execute(
            "create or replace view w as select t.id, t.v, o.name,"
            " greatest(t.updated_at, o.updated_at) as updated_at, t.id * 2 as twice"
            " from t left join owner o on o.id = t.id % 10"
        )
        source.execute("update t set updated_at = now() where id = 5")
        source.catch_up()
        assert is_equal(source, "id", "v", "twice"), "rows of before have the new column's values"


def test_a_view_that_is_replaced_while_it_is_copied_begins_anew(new_lake: NewLake) -> None:
    with new_lake(f"{JOINED} insert into t {ROWS}", OF_W, query=QUERY) as source:
        source.pins.prepare()
        source.pins.tick()
        source.execute("alter view w rename column name to called")
        with pytest.raises(Exception, match="begins anew"):
            source.copy()
        copied(source)
        source.catch_up()
        assert source.row(W).state == TableState.STREAMING
        assert is_equal(source, "id", "v", "called")


def test_a_key_that_became_an_equal_one_is_a_row_that_is_gone(new_lake: NewLake) -> None:
    """Of each type whose values have several texts, or one that isn't the value's cast to text."""
    made = """
    create table t (n numeric, c char(5), u uuid, i inet, d interval, v int,
      updated_at timestamptz not null default now());
    insert into t values ('1.0', 'a', gen_random_uuid(), '10.0.0.1', '1 day', 1),
      (2, 'b', gen_random_uuid(), '::1', '24:00', 2);
    create view w as select * from t"""
    keyed = OF_W | {"key": [*"ncuid"]}
    with new_lake(made, keyed, query=QUERY) as source:
        copied(source)
        source.catch_up()
        look_for_deletes(source, W)
        assert in_lake(source, W, "v") == [(1,), (2,)], "all are there"
        source.execute("update t set n = '1.00', v = 3, updated_at = now() where v = 1")
        source.execute("update t set d = '1 day', updated_at = now(), v = 4 where v = 2")
        source.catch_up()
        look_for_deletes(source, W)
        assert in_lake(source, W, "v") == [(3,), (4,)]


def test_a_foreign_table_is_copied_followed_and_relieved_of_deleted_rows(
    postgres_servers: Callable[[int], EmbeddedPostgres],
    spark_server: SparkServer,
    tmp_home: object,
) -> None:
    with databases(postgres_servers(15)) as new:
        far = new()
        with psycopg.connect(far, autocommit=True) as remote:
            remote.execute(f"{REMOTE} insert into far {ROWS}".encode())
            with lake(
                new(), spark_server.ensure(), foreign(far, "w"), LAGGING, query=QUERY
            ) as source:
                copied(source)
                assert is_equal(source, "id", "v")
                remote.execute("insert into far values (1000, 'new')")
                remote.execute("delete from far where id = 20")
                source.catch_up()
                look_for_deletes(source, W)
                assert is_equal(source, "id", "v")
                assert "= ANY" in asked_elsewhere(source), "not for the whole table"


def asked_elsewhere(source: Lake) -> str:
    """What the other server is asked for when keys are looked up."""
    found = key_columns(source.source, source.row(W).oid, [1])
    [lookup] = lookups([found[1]], [("1",), ("2",)])
    query = sql.SQL("explain verbose select k.n from {} join w t on {}").format(
        lookup.listed, lookup.equal
    )
    plan = [str(line) for (line,) in source.source.execute(query)]
    return next(line for line in plan if "Remote SQL" in line)
