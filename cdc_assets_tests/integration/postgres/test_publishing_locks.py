"""ALTER PUBLICATION beside what else goes on at the source: nobody's statement fails by it."""

from __future__ import annotations

import threading

import psycopg
import pytest

from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.publication.changing import Publishing, publish, withdraw
from cdc_assets.postgres.publication.contents import published_tables
from cdc_assets_tests.support.flusher import Bench
from cdc_assets_tests.support.waiting import wait_for

A, B, C = (TableId("public", name) for name in "abc")


@pytest.fixture
def postgres_version() -> int:
    return 16


@pytest.fixture
def source(source: Bench) -> Bench:
    for name in "abc":
        source.execute(f"create table {name} (id int primary key, v int)")
    return source


def test_a_migration_of_many_tables_meets_no_deadlock(source: Bench) -> None:
    """It waits for a table that we have locked, while we wait for one that it has."""
    made = list[Publishing]()
    with (
        psycopg.connect(source.dsn) as vacuuming,
        psycopg.connect(source.dsn) as migrating,
        psycopg.connect(source.dsn, autocommit=True) as own,
    ):
        vacuuming.execute("lock table b in share update exclusive mode")
        migrating.execute("lock table c in access exclusive mode")
        pid = own.info.backend_pid
        publishing = threading.Thread(target=lambda: made.append(publish(own, "p", [A, B, C])))
        publishing.start()
        waits = "select 1 from pg_locks where not granted and pid = %s"
        wait_for(lambda: source.execute(waits, pid))
        altering = threading.Thread(target=lambda: migrating.execute("alter table a add w int"))
        altering.start()
        wait_for(
            lambda: not altering.is_alive() or source.execute(waits, migrating.info.backend_pid)
        )
        vacuuming.rollback()
        altering.join()
        migrating.commit()  # raises if its statement failed
        publishing.join()
        assert publish(own, "p", [A, B, C]) == Publishing({})
    columns = "select 1 from pg_attribute where attrelid = 'a'::regclass and attname = 'w'"
    assert source.execute(columns)


def test_an_autovacuum_is_in_nobodys_way(source: Bench) -> None:
    """One takes hours, and while a table can't be withdrawn, Postgres refuses its changes."""
    publish(source.connection, "p", [A])
    source.execute("insert into a select i from generate_series(1, 50000) i; delete from a")
    source.execute(
        "alter table a set (autovacuum_vacuum_cost_delay = 100, autovacuum_vacuum_cost_limit = 1,"
        " autovacuum_vacuum_threshold = 1, autovacuum_vacuum_scale_factor = 0)"
    )
    source.execute("alter system set autovacuum_naptime = '1s'")
    source.execute("select pg_reload_conf()")
    try:
        wait_for(
            lambda: source.execute(
                "select 1 from pg_stat_progress_vacuum where relid = 'a'::regclass"
            )
        )
        assert withdraw(source.connection, "p", [A]) == Publishing({})
    finally:
        source.execute("alter system reset autovacuum_naptime")
        source.execute("select pg_reload_conf()")
    assert published_tables(source.connection, "p") == {}
