"""Copies of large values, many columns, tables that grow, and odd names."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.postgres.names import TableId
from cdc_assets.snapshot.coordinator import copy_table
from cdc_assets.verify.source import parts, whole
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.integration.snapshot.sources import PAIR, T, U, chunk_keys
from cdc_assets_tests.support.lake import NewLake, lake

pytestmark = pytest.mark.spark


ODD = TableId("My.Schema", "we ird/ta'ble%\"x – ü")


def worker_peak_bytes() -> int:
    """The largest resident set that one of this session's Spark Python workers ever had."""
    peaks = [0]
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # or a zombie
            if "cdc_assets.snapshot.python_daemon" in process.cmdline():
                status = Path(f"/proc/{process.pid}/status").read_text()
                peaks += [int(kb) * 1024 for kb in re.findall(r"VmHWM:\s+(\d+)", status)]
    return max(peaks)


def test_values_of_a_hundred_megabytes_are_copied_in_bounded_memory(copied_lake: NewLake) -> None:
    setup = """
    create table t (id int primary key, v text, b bytea);
    insert into t select i, repeat(md5(i::text), 3276800),
           decode(repeat(md5(i::text), 3276800), 'hex') from generate_series(1, 8) i;
    """
    with copied_lake(
        setup,
        "t",
        snapshot={"max_parallel_chunks": 1},
    ) as source:
        peak = worker_peak_bytes()
        # Row by row: a vectorized batch of all eight is 1.2 GB of a heap that is shared.
        source.session.conf.set("spark.sql.iceberg.vectorization.enabled", "false")
        found = source.session.sql(
            f"select id, length(v), md5(v), length(b), md5(b) from {source.lake_table(T).sql_name}"
        ).collect()
        there = source.execute("select id, length(v), md5(v), length(b), md5(b) from t order by 1")
        assert sorted(tuple(row) for row in found) == there
        assert there[0][1] == 104_857_600
        assert there[0][3] == 52_428_800
        print(f"a worker's peak: {peak / 2**20:.0f} MB")  # noqa: T201
        # Some copies of one row, however many rows there are: 1.2 GB with one, 1.4 GB with eight.
        assert 0 < peak < 12 * 150 * 2**20


def test_a_table_of_a_thousand_columns_is_copied_and_followed(copied_lake: NewLake) -> None:
    kinds = ("int", "text", "numeric(6,2)", "boolean", "date")
    values = ("i", "'v' || i % 10", "i / 100.0", "i % 2 = 0", "date '2024-01-01' + i % 300")
    columns = "".join(f", c{n} {kinds[n % 5]}" for n in range(999))
    listed = "".join(f", {values[n % 5]}" for n in range(999))
    setup = f"""
    create table t (id int primary key{columns});
    insert into t select i{listed} from generate_series(1, 2000) i;
    """
    with copied_lake(setup, "t") as source:
        assert source.equal(T)
        source.execute("update t set c0 = -1, c998 = null where id % 10 = 0")
        source.catch_up()
        assert source.equal(T)


def test_an_empty_table_and_one_that_grows_tenfold_show_the_moment_of_the_pin(
    new_lake: NewLake,
) -> None:
    setup = PAIR + "delete from u;" + "create table empty (id int primary key, v text);"
    with new_lake(setup, {"name": "t", "chunk_pages": 1}, "u", "empty") as source:
        source.pin()
        for table in ("t", "u"):
            source.execute(
                f"insert into {table} select i, 'new' from generate_series(1001, 10000) i"
            )
        source.copy()
        assert source.rows(T) == sorted(((i, f"old {i}") for i in range(1, 1001)), key=repr)
        assert source.rows(U) == []
        assert source.rows(TableId("public", "empty")) == []
        source.catch_up()
        assert len(source.rows(T)) == 10000
        assert all(source.equal(table) for table in source.tables)


def test_odd_names_are_copied_merged_and_verified(
    any_postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path
) -> None:
    setup = f"""
    create schema "My.Schema";
    create table {ODD} (
        "Id %s" int, "id %s" text, "a.b" text, "q""uo'te`" text, "Größe/\\ {{}}" numeric(5,1),
        primary key ("Id %s", "id %s")
    );
    insert into {ODD} select i, 'k' || i, 'v', repeat('x', 50), 1.5
      from generate_series(1, 3000) i;
    create table "we ird" (id int primary key);
    insert into "we ird" values (1);
    """
    names = (str(ODD), 'public."we ird"')
    with lake(
        any_postgres_dsn(),
        spark_server.ensure(),
        setup,
        *({"name": name, "chunk_pages": 4} for name in names),
    ) as source:
        source.pin()
        keys = chunk_keys(source, ODD)
        copy_table(source.pipeline, source.session, ODD, only=keys[:2])
        source.execute(f'update {ODD} set "a.b" = \'new\' where "Id %s" % 3 = 0')
        source.copy()
        source.execute(
            f'update {ODD} set "id %s" = \'moved\', "q""uo\'te`" = null where 9 > "Id %s"'
        )
        source.execute(f'delete from {ODD} where "Id %s" % 5 = 0')
        source.catch_up()
        assert source.equal(ODD)
        assert all(comparison.equal for comparison in source.verify())


def test_a_table_whose_bytes_are_in_toast_has_chunks_of_fewer_pages(new_lake: NewLake) -> None:
    setup = """
    create table t (id int primary key, v text not null);
    alter table t alter v set storage external;
    insert into t select i, repeat('x', 8000) from generate_series(1, 2000) i;
    """
    with new_lake(setup, {"name": "t", "chunk_pages": 40}) as source:
        source.pin()
        pages = source.execute("select pg_relation_size('t') / 8192")[0][0]
        assert 5 < pages < 40
        assert len(chunk_keys(source)) == pages
        with source.pipeline.connect_source("test") as connection:
            found = parts(connection, source.row(T).oid, only=True)
        assert len(whole(found, 40)) == pages
        assert len(whole(found, 40, counted=True)) == 1
        source.copy()
        assert source.equal(T)
