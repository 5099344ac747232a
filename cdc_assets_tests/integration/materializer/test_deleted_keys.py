"""The rows of a batch's keys are found by the keys' bounds, by their names, or by a join."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from cdc_assets.lake.catalog.catalog import CATALOG
from cdc_assets.lake.spark import session as sessions
from cdc_assets.lake.spark.session import row_by_row, unshuffled
from cdc_assets.lake.spark.sql import listed
from cdc_assets.materializer import winners
from cdc_assets.materializer.actions import commit, keys
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support.lake import Lake, NewLake

pytestmark = pytest.mark.spark

LEAST, GREATEST = -(2**63), 2**63 - 1
SETUP = f"""
create table small (id smallint primary key, v text);
create table big ("Odd `Id" bigint primary key, v text);
create table pair (a int, b text, c bigint, v text, primary key (b, c, a));
create table dotted (".id" int, id int, v text, primary key (".id", id));
create table one (".n" int primary key, v text);
insert into dotted values (1, 100, 'copied'), (2, 200, 'copied');
insert into one values (1, 'copied');
create table named (id text primary key, v text);
insert into small select n, 'copied' from generate_series(-32768, 32767, 1000) n;
insert into big values ({LEAST}, 'least'), (-1, 'minus'), (0, 'zero'), ({GREATEST}, 'greatest');
insert into pair select n % 7, 'b' || n % 3, n, 'copied' from generate_series(-40, 40) n;
insert into named select 'n' || n, 'copied' from generate_series(1, 40) n;
"""
NAMES = ("small", "big", "pair", "dotted", "one", "named")
TABLES = [TableId("public", name) for name in NAMES]
ENDS = f"""
update small set v = 'a' where id in (-32768, 232);
delete from small where id = 1232;
update big set v = 'a' where "Odd `Id" in ({LEAST}, {GREATEST});
update pair set v = 'a' where c between -5 and 5;
delete from pair where c = 40;
update dotted set v = 'a';
update one set v = 'a';
update named set v = 'a' where id < 'n2';
delete from named where id = 'n40'
"""
BEYOND_THE_BOUNDS_OF_BEFORE = f"""
update small set id = 32767 where id = 32232;
insert into small values (1, 'new');
delete from big where "Odd `Id" = {LEAST};
update big set "Odd `Id" = 7 where v = 'zero';
update pair set c = c + 100 where c > 30;
update dotted set id = 1 where id = 200;
update one set v = 'b';
update named set id = 'm' where id = 'n3'
"""
ALL = """
truncate small;
insert into small values (5, 'after');
update big set v = 'b';
delete from pair;
update one set v = 'c';
update named set v = 'b'
"""
NONE_OF_BEFORE = """
insert into small values (6, 'x');
delete from small where id = 6;
delete from big;
insert into pair values (1, 'b', 2, 'x');
delete from named where id = 'none'
"""


@pytest.fixture
def source(copied_lake: NewLake) -> Iterator[Lake]:
    with copied_lake(SETUP, *NAMES) as opened:
        yield opened


@pytest.mark.parametrize("way", ["named", "joined", "folded"])
def test_only_the_rows_of_the_batchs_keys_are_replaced(
    source: Lake, way: str, monkeypatch: pytest.MonkeyPatch, tmp_home: Path
) -> None:
    if way != "named":
        monkeypatch.setattr(keys, "_NAMED", 0)
    if way == "folded":  # by Spark
        monkeypatch.setattr(winners, "_STAGED_BYTES", -1)
    for statements in (ENDS, BEYOND_THE_BOUNDS_OF_BEFORE, ALL, NONE_OF_BEFORE):
        source.execute(statements)
        source.catch_up()
        for table in TABLES:
            assert source.equal(table), (table, statements)
    # Nor has a local file a checksum beside it.
    assert list(tmp_home.rglob("*.parquet")) and not list(tmp_home.rglob("*.crc"))


LONG = TableId("public", "long")
SPLIT = {
    "write.parquet.row-group-size-bytes": "20000",
    "write.parquet.row-group-check-min-record-count": "100",
    "write.parquet.compression-codec": "uncompressed",
    "read.split.target-size": "40000",
    "read.split.open-file-cost": "1",
    "read.split.adaptive-size.enabled": "false",
}


@pytest.mark.parametrize("way", ["named", "joined"])
def test_a_file_that_several_tasks_read_has_one_deletion_vector(
    copied_lake: NewLake, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way != "named":
        monkeypatch.setattr(keys, "_NAMED", 0)
    setup = "create table long (id int primary key, v text);"
    setup += "insert into long select n, repeat(md5(n::text), 4) from generate_series(1, 5000) n"
    with copied_lake(setup, "long") as source:
        source.execute("delete from long where id = 1")
        source.catch_up()  # a copied table's first merge gives it the format that has vectors
        lake = source.lake_table(LONG)
        source.session.sql(f"alter table {lake.sql_name} set tblproperties ({listed(SPLIT)})")
        source.session.sql(
            f"call {CATALOG}.system.rewrite_data_files({lake.procedure_name},"
            " options => map('rewrite-all', 'true'))"
        )
        table = source.session.table(lake.sql_name)
        assert table.select(F.spark_partition_id()).distinct().count() > 5
        for statement in ("update long set v = 'a'", "delete from long"):
            source.execute(f"{statement} where id % 89 = 0")
            source.catch_up()
            found = source.session.sql(f"select * from {lake.sql_name}.delete_files").collect()
            of = [row.referenced_data_file for row in found]
            assert len(of) == len(set(of)) > 0
            assert any("merged-dvs" in row.file_path for row in found)
            assert source.equal(LONG)


CUT, CUT_8 = TableId("public", "cut"), TableId("public", "cut8")
TRUNCATED = f"""
create table cut (id int primary key, v text);
create table cut8 (id bigint primary key, v text);
insert into cut select unnest(array[{-(2**31)}, -2000000000, -1700000000, -5, 7, 2000000000]), '';
insert into cut8 select unnest(array[{LEAST}, -8500000000000000000, -7, 5, {GREATEST}]), '';
"""


@pytest.mark.parametrize("folded", ["here", "by Spark"], indirect=True)
@pytest.mark.usefixtures("folded")
def test_keys_near_the_least_of_their_type_are_found_in_truncated_partitions(
    copied_lake: NewLake,
) -> None:
    parts = {"partition_by": ["truncate(1000, id)"]}
    with copied_lake(TRUNCATED, {"name": "cut", **parts}, {"name": "cut8", **parts}) as source:
        for value in "ab":
            source.execute(f"update cut set v = '{value}'; update cut8 set v = '{value}'")
            source.catch_up()
            assert source.equal(CUT)
            assert source.equal(CUT_8)


KEY = "spark.sql.iceberg.distribution-mode"
TWO = "create table two (id int primary key); insert into two values (1), (2)"


def test_a_distribution_that_a_user_has_chosen_stays(copied_lake: NewLake) -> None:
    with copied_lake(TWO, "two") as source:
        source.session.conf.set(KEY, "range")
        for number in (1, 2):
            source.execute(f"delete from two where id = {number}")
            source.catch_up()
        assert source.session.conf.get(KEY, None) == "range"


def test_a_tables_own_distribution_stays(copied_lake: NewLake) -> None:
    with copied_lake(TWO, "two") as source:
        source.execute("delete from two where id = 1")
        source.catch_up()
        lake = source.lake_table(TableId("public", "two"))
        assert commit._is_small(lake.loaded())
        chosen = {"write.merge.distribution-mode": "range"}
        source.session.sql(f"alter table {lake.sql_name} set tblproperties ({listed(chosen)})")
        assert not commit._is_small(lake.loaded())


def test_a_lost_reply_leaves_no_distribution(
    copied_lake: NewLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    with copied_lake(TWO, "two") as source:
        conf = type(source.session.conf)
        done = conf.set

        def lost(self: Any, key: str, value: str) -> None:
            done(self, key, value)
            if key == KEY:
                raise PySparkException("the reply is lost")

        monkeypatch.setattr(conf, "set", lost)
        with pytest.raises(PySparkException), unshuffled(source.session):
            pass
        assert source.session.conf.get(KEY, None) is None


RULES = "spark.sql.optimizer.excludedRules"
RULE = "org.apache.spark.sql.execution.datasources.v2.OptimizeMetadataOnlyDeleteFromTable"
SOME = """
create table two (id int primary key, v int);
create table parts (like two including all);
insert into two select generate_series(1, 9);
insert into parts select * from two;
create table one (like two including all);
insert into one values (1)
"""


def test_a_delete_of_several_rows_is_not_asked_for_whole_files(
    copied_lake: NewLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, asked, delete = TableId("public", "two"), list[bool](), commit._delete

    def noted(session: SparkSession, *others: Any) -> None:
        asked.append(RULE not in (session.conf.get(RULES, None) or ""))
        delete(session, *others)

    monkeypatch.setattr(commit, "_delete", noted)
    with copied_lake(SOME, "two", {"name": "parts", "partition_by": ["id"]}) as source:
        for statement in (
            "update two set v = 1 where id < 3",
            "update two set v = 2 where id = 4",
            "update parts set v = 1 where id < 3",
            "truncate two",
        ):
            source.execute(statement)
            source.catch_up()
        assert asked == [False, True, True, True]
        assert source.session.conf.get(RULES, None) is None
        assert source.equal(table)
        assert source.equal(TableId("public", "parts"))


def test_a_table_of_one_row_stays_one_file(copied_lake: NewLake) -> None:
    """Each delete of the row is one of a whole file."""
    with copied_lake(SOME, "one") as source:
        for number in range(3):
            source.execute(f"update one set v = {number}")
            source.catch_up()
        lake = source.lake_table(TableId("public", "one"))
        files = source.session.sql(f"select content, record_count from {lake.sql_name}.files")
        assert [tuple(row) for row in files.collect()] == [(0, 1)]


def test_rules_that_a_user_has_excluded_stay(copied_lake: NewLake) -> None:
    with copied_lake(SOME, "two") as source:
        source.session.conf.set(RULES, "some.Rule")
        with row_by_row(source.session):
            assert source.session.conf.get(RULES, None) == f"some.Rule,{RULE}"
        assert source.session.conf.get(RULES, None) == "some.Rule"


@pytest.mark.parametrize("version", ["1.12.0-SNAPSHOT", "1.12.0-amzn-0", "unknown"])
def test_only_a_release_of_iceberg_is_known(version: str) -> None:
    rows = SimpleNamespace(collect=lambda: [(version,)])
    session = SimpleNamespace(sql=lambda _: rows)
    assert sessions._iceberg(cast("SparkSession", session)) == ()
