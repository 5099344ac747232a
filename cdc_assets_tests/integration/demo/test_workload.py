"""The demo's tables and traffic: every kind of change, counted, the same for the same seed."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

from cdc_assets.demo import shop
from cdc_assets.demo.schema import create_demo_schema
from cdc_assets.demo.workload import LiveTraffic
from cdc_assets.embedded.postgres import EmbeddedPostgres

SHOP = ("customers", "orders", "order_lines", '"Mixed Case.Table"', "empty_table")


def contents(dsn: str) -> list[object]:
    with psycopg.connect(dsn) as connection:
        return [
            connection.execute(
                "select count(*), md5(string_agg(t::text, '|' order by t::text))"
                f" from shop.{table} t".encode()
            ).fetchone()
            for table in SHOP
        ]


def query(dsn: str, text: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsn) as connection:
        return connection.execute(text.encode()).fetchall()


@pytest.fixture
def demo_dsn(postgres_dsn: Callable[[], str]) -> str:
    dsn = postgres_dsn()
    create_demo_schema(dsn, customers=300)
    return dsn


def test_the_tables_have_what_real_ones_have(demo_dsn: str) -> None:
    out_of_line = query(
        demo_dsn,
        "select count(*) from shop.customers where pg_column_toast_chunk_id(profile) is not null",
    )
    assert out_of_line == [(200,)]
    types = query(
        demo_dsn,
        "select distinct format_type(atttypid, atttypmod) from pg_attribute a join pg_class c"
        " on c.oid = attrelid where relnamespace = 'shop'::regnamespace and relkind = 'r'"
        " and attnum > 0",
    )
    assert {name for (name,) in types} >= {
        *("uuid", "shop.tier", "jsonb", "text[]", "numeric(12,2)", "numeric"),
        *("timestamp with time zone", "timestamp without time zone", "bigint", "integer"),
    }
    assert query(demo_dsn, "select count(*) from shop.empty_table") == [(0,)]
    assert query(demo_dsn, "select count(*) from pgbench_accounts") == [(100_000,)]
    identity = "select relreplident from pg_class where oid = 'pgbench_history'::regclass"
    assert query(demo_dsn, identity) == [("f",)]


def test_making_them_again_changes_nothing(demo_dsn: str) -> None:
    LiveTraffic(demo_dsn).run(50)
    before = contents(demo_dsn)
    create_demo_schema(demo_dsn, customers=300)
    assert contents(demo_dsn) == before


def test_half_made_tables_are_made_anew(demo_dsn: str) -> None:
    with psycopg.connect(demo_dsn) as connection:
        connection.execute("alter table pgbench_accounts drop constraint pgbench_accounts_pkey")
        connection.execute("delete from pgbench_accounts where aid > 10")
        connection.execute("comment on schema shop is null")
        connection.execute("drop table shop.orders cascade")
    create_demo_schema(demo_dsn, customers=300)
    assert query(demo_dsn, "select count(*) from pgbench_accounts") == [(100_000,)]
    assert query(demo_dsn, "select count(*) from shop.orders") == [(1500,)]


def test_it_works_on_each_version(any_postgres_dsn: Callable[[], str]) -> None:
    dsn = any_postgres_dsn()
    create_demo_schema(dsn, customers=50)
    assert LiveTraffic(dsn).run(400).changes >= 400


def test_the_same_seed_makes_the_same_changes(postgres_dsn: Callable[[], str]) -> None:
    made = []
    for seed in (7, 7, 8):
        dsn = postgres_dsn()
        create_demo_schema(dsn, customers=100)
        LiveTraffic(dsn, seed).run(1_000)
        made.append(contents(dsn))
    assert made[0] == made[1]
    assert made[0] != made[2]


def test_counts_are_what_the_server_saw(demo_dsn: str) -> None:
    seen = (
        "select sum(n_tup_ins + n_tup_upd + n_tup_del)::bigint from pg_stat_user_tables"
        " where relname like 'pgbench%'"
    )
    time.sleep(1.5)  # a session's statistics arrive up to a second after its end
    before = query(demo_dsn, seen)[0][0]
    count = LiveTraffic(demo_dsn).run(4_000)
    assert count.changes >= 4_000
    assert count.pgbench_changes == 2_000
    time.sleep(1.5)
    after = query(demo_dsn, seen)[0][0]
    assert after - before == 2_000


@pytest.mark.parametrize("operation", shop.OPERATIONS, ids=lambda f: f.__name__)
def test_every_operation_works_from_nothing_and_again(
    postgres: EmbeddedPostgres, demo_dsn_shared: str, operation: shop.Operation
) -> None:
    rng = random.Random(3)
    with psycopg.connect(demo_dsn_shared, autocommit=True) as connection:
        connection.execute("truncate shop.customers cascade")
        for _ in range(15):
            with connection.transaction():
                assert operation(connection, rng) >= 0


@pytest.fixture(scope="module")
def demo_dsn_shared(postgres: EmbeddedPostgres) -> str:
    from cdc_assets_tests.conftest import with_database

    dsn = postgres.start()
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("drop database if exists operations")
        connection.execute("create database operations")
    made = with_database(dsn, "operations")
    create_demo_schema(made, customers=1)
    return made


def test_undone_work_is_not_there(demo_dsn: str) -> None:
    rng = random.Random(5)
    before = contents(demo_dsn)
    with psycopg.connect(demo_dsn, autocommit=True) as connection:
        for _ in range(20):
            with connection.transaction():
                shop.roll_back(connection, rng)
        assert contents(demo_dsn) == before
        for _ in range(20):
            with connection.transaction():
                assert shop.roll_back_in_part(connection, rng) == 2
    notes = "select note, count(*) from shop.customers where note in ('kept', 'undone') group by 1"
    assert query(demo_dsn, notes) == [("kept", 20)]


def test_keys_are_swapped_with_their_rows(demo_dsn: str) -> None:
    by_key = "select id, email from shop.customers order by id"
    before = dict(query(demo_dsn, by_key))
    with psycopg.connect(demo_dsn, autocommit=True) as connection, connection.transaction():
        assert shop.swap_keys(connection, random.Random(1)) == 3
    after = dict(query(demo_dsn, by_key))
    moved = {key for key in before if before[key] != after[key]}
    assert before.keys() == after.keys()
    assert len(moved) == 2


def test_traffic_keeps_its_pace_and_its_size(demo_dsn: str) -> None:
    stopping = threading.Event()
    threading.Timer(6.5, stopping.set).start()
    began = time.monotonic()
    count = LiveTraffic(demo_dsn).run_until(stopping, rate_per_second=200)
    seconds = time.monotonic() - began
    assert 100 < count.changes / seconds < 300
    assert count.pgbench_changes > 0
    LiveTraffic(demo_dsn, seed=2).run(20_000)
    (customers,), (orders,) = query(
        demo_dsn, "select count(*) from shop.customers union all select count(*) from shop.orders"
    )
    assert 150 < customers < 600
    assert orders < 3_000


def test_one_half_that_fails_ends_the_other(demo_dsn: str) -> None:
    with psycopg.connect(demo_dsn) as connection:
        connection.execute("drop table pgbench_tellers")
    with pytest.raises(Exception, match="pgbench failed"):
        LiveTraffic(demo_dsn).run_until(threading.Event(), rate_per_second=50)


def test_the_process_makes_traffic_survives_restarts_and_dies_with_its_parent(
    public_directory: Path,
) -> None:
    server = EmbeddedPostgres(public_directory / "workload", settings={"fsync": "off"})
    dsn = server.start()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "cdc_assets.demo.workload"),
            *("--directory", str(server.directory), "--rate", "400"),
        ],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:

        def history() -> int:
            try:
                return int(query(dsn, "select count(*) from pgbench_history")[0][0])
            except psycopg.Error:
                return 0

        def grows() -> bool:
            seen, deadline = history(), time.monotonic() + 30
            while time.monotonic() < deadline:
                if history() > max(seen, 1):
                    return True
                time.sleep(0.2)
            return False

        assert grows()
        server.stop()
        time.sleep(0.5)
        assert server.start() == dsn
        assert grows(), "after the server's restart"
        children = psutil.Process(process.pid).children(recursive=True)
        for child in children:
            with suppress(psutil.NoSuchProcess):  # or a zombie
                assert dsn.split(":")[2].split("@")[0] not in " ".join(child.cmdline())
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(10) == 0
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        server.stop()
        assert process.stderr is not None
        process.stderr.close()
