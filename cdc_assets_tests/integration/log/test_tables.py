"""The registry of tables, as whoever reads it again and again does, or writes many."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from cdc_assets.pins.enrol import register_tables
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support.flusher import (
    Bench,
)
from cdc_assets_tests.support.waiting import wait_for


def test_a_change_of_what_is_registered_is_seen_without_reading_it(source: Bench) -> None:
    source.execute("create table t (id int primary key, v text)")
    config = source.config("public.t")
    source.flush(config)
    another = (
        "insert into _pg2iceberg.tables (source, table_name, oid, state, key_columns, columns)"
        " select %s, %s, oid, state, key_columns, columns from _pg2iceberg.tables"
    )
    with Pipeline.open(config) as pipeline:
        revision = pipeline.store.revision
        found = [revision()]
        assert revision() == found[0]
        source.execute("update _pg2iceberg.tables set reason = 'x'")
        found.append(revision())
        source.execute("update _pg2iceberg.tables set reason = null")
        found.append(revision())
        source.execute(another, source.name, "public.other")
        found.append(revision())
        source.execute("delete from _pg2iceberg.tables where table_name = 'public.t'")
        found.append(revision())
        source.execute(another, "another source", "public.t")
        assert revision() == found[-1]
    assert len(set(found)) == len(found)


def test_of_one_table_no_other_is_read(source: Bench) -> None:
    """With 500 tables of 30 columns all of them take 0.1 s, and a merge asks more than once."""
    source.execute("create table t (id int primary key, v text)")
    config = source.config("public.t")
    source.flush(config)
    source.execute(
        "insert into _pg2iceberg.tables (source, table_name, oid, state, key_columns, columns)"
        " select source, 'public.other', oid, state, key_columns, '\"unreadable\"' from"
        " _pg2iceberg.tables"
    )
    with Pipeline.open(config) as pipeline:
        row = pipeline.store.table(TableId("public", "t"))
        assert row is not None and [column.name for column in row.columns] == ["id", "v"]
        assert pipeline.store.table(TableId("public", "none")) is None


def test_two_that_describe_new_tables_end_in_no_deadlock(source: Bench) -> None:
    """By configurations that have them in different orders."""
    for name in ("a", "m", "z"):
        source.execute(f"create table {name} (id int primary key)")
    one = source.config("public.z", "public.m", "public.a")
    other = source.config("public.a", "public.m", "public.z")
    waits = "select 1 from pg_locks where not granted and locktype in ('tuple', 'transactionid')"
    with (
        Pipeline.open(one) as mine,
        Pipeline.open(other) as theirs,
        mine.connect_source("pins") as here,
        theirs.connect_source("pins") as there,
        ThreadPoolExecutor() as threads,
    ):
        with source.connection.transaction(force_rollback=True):
            source.execute(
                "insert into _pg2iceberg.tables"
                " (source, table_name, oid, state, key_columns, columns)"
                " values (%s, 'public.m', 0, 'waiting', '{}', '[]')",
                source.name,
            )
            first = threads.submit(register_tables, here, one, mine.store)
            wait_for(lambda: len(source.execute(waits)) == 1)
            second = threads.submit(register_tables, there, other, theirs.store)
            wait_for(lambda: len(source.execute(waits)) > 1)
        first.result()
        second.result()
        assert len(mine.store.tables()) == 3


def test_who_describes_tables_and_who_marks_them_as_followed_end_in_no_deadlock(
    source: Bench,
) -> None:
    """Each writes them in one transaction, whatever their order in the configuration."""
    source.execute("create table a (id int primary key); create table b (id int primary key)")
    config = source.config("public.b", "public.a")
    waits = "select 1 from pg_locks where not granted and locktype in ('tuple', 'transactionid')"
    with (
        Pipeline.open(config) as pins,
        Pipeline.open(config) as flusher,
        pins.connect_source("pins") as there,
        ThreadPoolExecutor() as threads,
    ):
        register_tables(there, config, pins.store)
        rows = flusher.store.tables()
        with source.connection.transaction():
            source.execute(
                "update _pg2iceberg.tables set reason = '' where table_name = 'public.a'"
            )
            marked = threads.submit(flusher.store.mark_followed, rows)
            wait_for(lambda: len(source.execute(waits)) == 1)
            described = threads.submit(register_tables, there, config, pins.store)
            wait_for(lambda: len(source.execute(waits)) > 1)
        marked.result()
        described.result()
        assert all(row.followed for row in flusher.store.tables())
