"""Long, deep and escape-heavy values of every type come through the log, and the server lives."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc_assets.postgres.names import TableId
from cdc_assets.spark.server import SparkServer
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.lake_support import lake

pytestmark = pytest.mark.spark

T = TableId("public", "t")
# Every other character has to be quoted or escaped somewhere on the way.
_LONG, _HARD = (
    f"""(repeat(E' ,"\\\\{{}}\'\'\\n\\té😀', {n}) || 'xx')""" for n in (181_818, 20_000)
)
# type -> one value: long or deep enough that anything recursive would give up.
EXTREME = {
    "text": _LONG,
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
    "numeric": "repeat('9', 100000)::numeric",
    "json": f"(repeat('[', 5000) || to_json({_HARD}) || repeat(']', 5000))::json",
    "jsonb": f"(repeat('[', 5000) || to_json({_HARD}) || repeat(']', 5000))::jsonb",
    "jsonb[]": f"array[to_jsonb({_HARD})]",
    "pair": f"row(1, {_HARD})::pair",
    "pair[]": f"array[row(1, {_HARD})::pair]",
    "nest": f"row(row(row(1, {_HARD})::pair)::holder)::nest",
    "varbit": "repeat('10', 1000000)::varbit",
    "int8multirange": "(select range_agg(int8range(2 * i, 2 * i + 1))"
    " from generate_series(1, 20000) as i)",
    "path": "('[' || repeat('(1,2),', 50000) || '(3,4)]')::path",
    "tsvector": "(select string_agg('w' || i, ' ') from generate_series(1, 20000) as i)::tsvector",
}
TYPES = """
create type pair as (a int, b text);
create type holder as (p pair);
create type nest as (h holder);
"""


def test_values_of_any_length_come_through_the_log(
    postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path
) -> None:
    listed = ", ".join(f"c{i} {kind}" for i, kind in enumerate(EXTREME))
    with lake(
        postgres_dsn(),
        spark_server.ensure(),
        f"{TYPES} create table t (id int primary key, {listed})",
        "t",
    ) as opened:
        opened.pin()
        opened.copy()
        for i, value in enumerate(EXTREME.values()):
            opened.execute(f"insert into t (id, c{i}) values ({i}, {value})")
        opened.flush()
        assert opened.drain(T).changes == len(EXTREME)
        found = {row[0]: row[1 + row[0]] for row in opened.rows(T)}
        long, hard = opened.execute(f"select {_LONG}, {_HARD}")[0]
        assert len(long) == 2_000_000
        assert found[list(EXTREME).index("text[]")] == [long, None, "NULL", "", hard]
        assert opened.verify()[0].equal
