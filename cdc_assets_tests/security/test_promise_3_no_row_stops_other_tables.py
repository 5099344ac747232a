"""No row stops other tables: whatever is in one, at worst its own table is parked, by name.

Long, deep and escape-heavy values of every type come through the copy and the log, are compared and
sampled, and the Spark server lives. What ends it all the same is in ``test_promise_3_lost_server``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.maintenance.run import maintain
from cdc_assets.postgres.names import TableId
from cdc_assets.verify.representable import unrepresentable
from cdc_assets.verify.sample import sample
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.support.flusher import flushing
from cdc_assets_tests.support.jvm import ARROW_BYTES
from cdc_assets_tests.support.lake import Lake, NewLake, copied

pytestmark = pytest.mark.spark

BATCH_SIZE = "read.parquet.vectorization.batch-size"
T, OTHER = TableId("public", "t"), TableId("public", "other")
# Every other character has to be quoted or escaped somewhere on the way.
_LONG, _HARD = (
    f"""(repeat(E' ,"\\\\{{}}\'\'\\n\\té😀', {n}) || 'xx')""" for n in (181_818, 20_000)
)
# Beyond 20 MB a JSON parser of Java's gives up, unless it is told not to.
_HUGE = f"(repeat({_HARD}, 80))"
# Levels of JSON.
_DEEP = 10_000
_JSON = f"(repeat('[{{\"a\":', {_DEEP // 2}) || to_json({_HARD}) || repeat('}}]', {_DEEP // 2}))"
# type -> one value: long or deep enough that anything recursive would give up.
EXTREME = {
    "text": _HUGE,
    "varchar": _HARD,
    "char(2000000)": "'ends with spaces'",
    "bytea": "decode(repeat('005c227bff', 200000), 'hex')",
    "text[]": f"array[{_LONG}, null, 'NULL', '', {_HARD}]",
    "varchar[]": "string_to_array(repeat(E'a \"\\\\|', 50000), '|')",
    "bytea[]": "array[decode(repeat('5c', 1000000), 'hex'), null]",
    "int[]": "array(select i from generate_series(1, 100000) as i)",
    "float8[]": "array(select i / 7.0::float8 from generate_series(1, 20000) as i)",
    "numeric(38,10)[]": "array(select i / 7.0 from generate_series(1, 20000) as i)",
    "timestamptz[]": "array_fill('2026-01-02 03:04:05.678901+00'::timestamptz, array[20000])",
    "boolean[]": "array_fill(true, array[200000])",
    "uuid[]": "array_fill('a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'::uuid, array[20000])",
    "numeric": "repeat('9', 131072)::numeric",
    "numeric(1000,500)": "(repeat('9', 500) || '.' || repeat('9', 500))::numeric",
    "json": f"{_JSON}::json",
    "jsonb": f"{_JSON}::jsonb",
    "jsonb[]": f"array[to_jsonb({_HARD})]",
    "mood[]": "array_fill('so \"so\\'::mood, array[50000])",
    "words": f"array[{_HARD}]",
    "pair": f"row(1, {_HARD})::pair",
    "pair[]": f"array[row(1, {_HARD})::pair]",
    "nest": f"row(row(row(1, {_HARD})::pair)::holder)::nest",
    "bit varying": "repeat('10', 1000000)::varbit",
    "int8multirange": "(select range_agg(int8range(2 * i, 2 * i + 1))"
    " from generate_series(1, 20000) as i)",
    "textrange": f"textrange('', {_HARD})",
    "path": "('[' || repeat('(1,2),', 50000) || '(3,4)]')::path",
    "polygon": "('(' || repeat('(1,2),', 50000) || '(3,4))')::polygon",
    "interval[]": "array_fill('-3 mons 4 days -00:00:00.1'::interval, array[20000])",
    "inet[]": "array_fill('::ffff:10.0.0.1/120'::inet, array[20000])",
    "tsvector": "(select string_agg('w' || i, ' ') from generate_series(1, 20000) as i)::tsvector",
    "tsquery": "(select string_agg('w' || i, ' & ') from generate_series(1, 250) as i)::tsquery",
}
TYPES = """
create type mood as enum ('so "so\\');
create type pair as (a int, b text);
create type holder as (p pair);
create type nest as (h holder);
create type textrange as range (subtype = text);
create domain words as text[];
"""


def _all_looks(opened: Lake, table: TableId) -> None:
    """Whatever reads rows besides the merge."""
    compared = {found.table: found for found in opened.verify()}[table]
    assert (compared.problem, compared.differing) == (None, 0)
    with flushing(opened.config):
        found = sample(opened.pipeline, opened.session, table, 1000)
    assert (found.skipped, found.differing) == (None, 0)
    assert found.rows > 0
    assert unrepresentable(opened.pipeline, opened.session, opened.lake_table(table)) == {}


def test_values_of_any_length_come_through_copy_and_log(copied_lake: NewLake) -> None:
    listed = ", ".join(f"c{i} {kind}" for i, kind in enumerate(EXTREME))
    values = [*EXTREME.values()]

    def insert(first: int) -> str:
        return ";".join(
            f"insert into t (id, c{i}) values ({first + i}, {value})"
            for i, value in enumerate(values)
        )

    setup = f"{TYPES} create table t (id int primary key, {listed}); {insert(0)}"
    with copied_lake(setup, "t") as opened:
        opened.execute(insert(1000))
        opened.flush()
        opened.drain(T)
        found = {row[0]: row[1 + row[0] % 1000] for row in opened.rows(T)}
        for i, kind in enumerate(EXTREME):
            assert repr(found[i]) == repr(found[1000 + i]), kind
        long, hard = opened.execute(f"select {_LONG}, {_HARD}")[0]
        assert len(long) == 2_000_000
        assert found[list(EXTREME).index("text[]")] == [long, None, "NULL", "", hard]
        _all_looks(opened, T)


def test_values_that_are_large_together_can_be_read_from_one_file(copied_lake: NewLake) -> None:
    """What a batch of the reader has of a column has to fit into one of Arrow's vectors."""
    rows, length = 5000, ARROW_BYTES // 4000
    setup = "create table t (id int primary key, v text)"
    with copied_lake(setup, "t") as opened:
        opened.execute("insert into t values (-1, '')")
        opened.flush()
        opened.drain(T)
        name = opened.lake_table(T).sql_name
        # A table that an earlier version made is put right, before it is compacted.
        opened.session.sql(f"alter table {name} unset tblproperties ('{BATCH_SIZE}')")
        [done] = maintain(opened.pipeline, lambda: opened.session, [T])
        assert (done.problem, done.left_alone) == (None, None)
        made = opened.lake_table(T).load()
        assert made is not None and BATCH_SIZE in made.properties
        opened.session.sql(
            f"insert into {name} select id, concat(id, repeat('x', {length}))"
            f" from range(0, {rows}, 1, 1)"
        )
        [found] = opened.session.sql(f"select count(*), sum(length(v)) from {name}").collect()
        assert found[0] == rows + 1 and found[1] > ARROW_BYTES
        files = opened.session.sql(f"select record_count from {name}.files").collect()
        assert sorted(file[0] for file in files) == [1, rows]


# Each has values that the lake can't hold, which are counted column by column.
_LOSSY = ("timestamptz", "numeric(12,2)", "date", "text[]", "timestamp")


def _wide(spark_url: str, dsn: str, count: int) -> None:
    listed = ", ".join(f"c{i} {_LOSSY[i % len(_LOSSY)]}" for i in range(count))
    setup = f"""
        create table t (id int primary key, {listed}); create table other (id int primary key);
        insert into t (id, c0, c1, c3) values (1, now(), 1.5, '{{a,b}}');
    """
    with copied(dsn, spark_url, setup, "t", "other") as opened:
        opened.execute(f"insert into t (id, c2, c{count - 1}) values (2, now(), null)")
        opened.execute("update t set c3 = array['c'] where id = 1; insert into other values (1)")
        opened.catch_up()
        assert opened.rows(OTHER) == [(1,)]
        assert [row[:5:4] for row in opened.rows(T)] == [(1, ["c"]), (2, None)]
        _all_looks(opened, T)


def test_a_table_of_more_columns_than_a_function_takes_arguments(
    postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path
) -> None:
    _wide(spark_server.ensure(), postgres_dsn(), 120)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_table_of_as_many_columns_as_there_may_be(
    postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path
) -> None:
    _wide(spark_server.ensure(), postgres_dsn(), 1599)
