"""First copies that are read from a restored dump, which was taken under a held snapshot."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cdc_assets.config.snapshot import SnapshotConfig
from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.log.states import TableState
from cdc_assets.operations.holding import held_point
from cdc_assets.pins.elsewhere.restored import HeldPoint
from cdc_assets.pins.holders import join_pin
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.snapshot.coordinator import copy_table
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.integration.snapshot.elsewhere import (
    SETUP,
    TABLES,
    A,
    S,
    begin,
    begun,
    check_exact,
    copy_by,
    lead_to,
    reached,
    waits_for,
    writing,
)
from cdc_assets_tests.integration.snapshot.sources import WIDE, T, chunk_keys
from cdc_assets_tests.support.lake import Lake, NewLake
from cdc_assets_tests.support.waiting import wait_for

pytestmark = pytest.mark.spark

# Columns that were dropped aren't in the dump: those behind them have other numbers there.
DROPPED = "alter table t add gone int; alter table t drop gone; alter table t add w int default 3;"


@pytest.fixture
def source(new_lake: NewLake) -> Iterator[Lake]:
    with new_lake(SETUP + DROPPED, *TABLES, snapshot={"from": {"kind": "dump"}}) as opened:
        yield opened


def dumped(
    source: Lake, held: HeldPoint, database: str, tables: Sequence[TableId] = (T, A, S)
) -> None:
    """What pg_dump has under the snapshot, restored into another database."""
    bindir = EmbeddedPostgres(Path()).bindir
    dump = subprocess.run(
        [
            bindir / "pg_dump",
            *("--dbname", source.pipeline.source_dsn, "--snapshot", held.snapshot_name),
            *(f"--table={table}" for table in tables),
            *("--no-owner", "--no-publications"),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    subprocess.run(
        [bindir / "psql", "--dbname", database, "--quiet", "--set", "ON_ERROR_STOP=1"],
        input=dump.stdout,
        check=True,
        capture_output=True,
        timeout=60,
    )


def test_invariant_4_a_restored_dump_and_the_log_are_the_table(
    source: Lake, postgres_dsn: NewDatabase
) -> None:
    database = postgres_dsn()
    begin(source)
    assert waits_for(source) == "dump_awaited"
    with writing(source) as done:
        wait_for(lambda: done[0] > 50)
        source.pins.close()  # as the command is another process
        with held_point(source.pipeline) as held:
            assert set(held.tables) == {T, A, S}
            wait_for(lambda: done[0] > 100)
            dumped(source, held, database)
        before = done[0]
        wait_for(lambda: done[0] > before + 100)
        lead_to(source, database, str(held.lsn))
        wait_for(lambda: reached(source, TableState.COPYING))
        source.copy()
    assert source.row(T).snapshot_lsn == held.lsn
    assert not source.equal(T), "the test needs changes since the dump"
    source.catch_up()
    check_exact(source)
    assert [found.equal for found in source.verify()] == [True] * 3


def test_an_lsn_that_was_not_named_is_refused(source: Lake, postgres_dsn: NewDatabase) -> None:
    database = postgres_dsn()
    begin(source)
    with held_point(source.pipeline) as held:
        dumped(source, held, database)
    lead_to(source, database, str(Lsn(held.lsn.value + 8)))
    assert waits_for(source) == "dump_unknown_lsn"
    source.execute("alter table t add later int")
    lead_to(source, database, str(held.lsn))
    assert waits_for(source) == "dump_unknown_lsn", "the log goes on from another table"
    assert source.row(A).state == TableState.COPYING


def test_a_tick_while_a_dump_is_awaited_costs_nothing(source: Lake) -> None:
    """It may be awaited for days; each look writes what it found, and asks much of the source."""
    written = "select table_name, xmin::text from _pg2iceberg.tables order by 1"
    begin(source)
    assert waits_for(source) == "dump_awaited"
    before = source.execute(written)
    source.pins.tick()
    assert source.execute(written) == before
    source.execute("update _pg2iceberg.tables set log_from = null where table_name = 'public.a'")
    wait_for(lambda: begun(source))


def test_a_restored_table_without_all_columns_is_refused(
    source: Lake, postgres_dsn: NewDatabase
) -> None:
    begin(source)
    with held_point(source.pipeline) as held:
        pass
    lead_to(source, postgres_dsn(), str(held.lsn))
    assert waits_for(source) == "dump_other_table"


# Partitions on two levels, one with a name that has to be quoted.
PARTED = """
create table p (id int primary key, v text) partition by range (id);
create table "P 1" partition of p for values from (0) to (1000);
create table p2 partition of p for values from (1000) to (3000) partition by range (id);
create table p21 partition of p2 for values from (1000) to (3000);
insert into p select i, 'old ' || i from generate_series(0, 2999) i;
"""


def test_a_dump_without_all_partitions_is_refused(
    new_lake: NewLake, postgres_dsn: NewDatabase
) -> None:
    """That of a partitioned table alone has none, and would be taken for an empty table."""
    whole = postgres_dsn()
    with new_lake(PARTED, "p", snapshot={"from": {"kind": "dump"}}) as source:
        (table,) = source.tables
        begin(source)
        with held_point(source.pipeline) as held:
            parts = {str(part) for part in held.partitions}
            assert parts == {'public."P 1"', "public.p2", "public.p21"}
            for tables in ([table], [table, TableId("public", "P 1")]):
                database = postgres_dsn()
                dumped(source, held, database, tables)
                lead_to(source, database, str(held.lsn))
                assert waits_for(source, table) == "dump_other_table"
            dumped(source, held, whole, [*held.tables, *held.partitions])
        with psycopg.connect(whole, autocommit=True) as restored:
            restored.execute('create table later as table "P 1"; truncate "P 1"')
            lead_to(source, whole, str(held.lsn))
            assert waits_for(source, table) == "dump_other_table"
            restored.execute('insert into "P 1" table later')
        source.execute("update p set v = 'new' where id % 7 = 0")
        lead_to(source, whole, str(held.lsn))
        wait_for(lambda: reached(source, TableState.COPYING))
        source.copy()
        source.catch_up()
        assert source.equal(table)


def test_a_restore_that_goes_on_is_waited_for(source: Lake, postgres_dsn: NewDatabase) -> None:
    """All tables are there before the first row is; and some restores lock what they load."""
    database = postgres_dsn()
    source.execute("insert into a (v) values ('old')")
    begin(source)
    with held_point(source.pipeline) as held:
        dumped(source, held, database)
    lead_to(source, database, str(held.lsn))
    with psycopg.connect(database) as restoring:
        restoring.execute("create table loaded as table t; truncate t")
        restoring.commit()
        restoring.execute("insert into t table loaded; lock s")
        assert waits_for(source) == "dump_other_table"
        assert waits_for(source, S) == "dump_other_table"
        assert source.row(A).state == TableState.COPYING
    lead_to(source, database, str(held.lsn))
    assert reached(source, TableState.COPYING)
    source.copy()
    source.catch_up()
    assert [found.equal for found in source.verify()] == [True] * 3


def test_a_plan_is_of_one_database(source: Lake, postgres_dsn: NewDatabase) -> None:
    """Another one may have a table of the same oid and file, with its rows on other pages."""
    database = postgres_dsn()
    begin(source)
    with held_point(source.pipeline) as held:
        dumped(source, held, database)
    name = conninfo_to_dict(database)["dbname"]
    source.execute(f"create database {name}_2 template {name}")
    try:
        lead_to(source, database, str(held.lsn))
        wait_for(lambda: reached(source, TableState.COPYING))
        pin = str(source.row(T).pin)
        with closing(join_pin(source.pipeline.store, database, pin)):  # as a copy does that goes on
            lead_to(source, make_conninfo(database, dbname=f"{name}_2"), str(held.lsn))
            wait_for(lambda: reached(source, TableState.WAITING))
        assert {source.row(table).epoch for table in source.tables} == {2}
    finally:
        source.pins.close()
        source.execute(f"drop database {name}_2")


def test_a_copy_that_began_at_the_source_begins_anew_for_a_dump(new_lake: NewLake) -> None:
    """Its log began before any dump, whose rows are on other pages."""
    with new_lake(WIDE, "t") as source:
        source.pin()
        copy_by(source, SnapshotConfig.model_validate({"from": {"kind": "dump"}}))
        wait_for(lambda: begun(source))
        assert waits_for(source) == "dump_awaited"
        with held_point(source.pipeline) as held:
            assert [*held.tables] == [T]


def test_a_copy_goes_on_with_the_same_dump_alone(
    new_lake: NewLake, postgres_dsn: NewDatabase
) -> None:
    """A tool may bring a restored table up to a later snapshot: rows move to other pages by it."""
    database, origin = postgres_dsn(), {"from": {"kind": "dump"}}
    with new_lake(WIDE, {"name": "t", "chunk_pages": 64}, snapshot=origin) as source:
        begin(source)
        with held_point(source.pipeline) as held, held_point(source.pipeline) as later:
            dumped(source, held, database, [T])
        lead_to(source, database, str(held.lsn))
        wait_for(lambda: reached(source, TableState.COPYING))
        first, *_ = chunk_keys(source)
        copy_table(source.pipeline, source.session, T, only=[first])
        with psycopg.connect(database) as restored:
            restored.execute("create temp table s as table t; delete from t; insert into t table s")
        lead_to(source, database, str(later.lsn))
        wait_for(lambda: begun(source) and source.row(T).epoch == 2)
        assert waits_for(source) == "dump_unknown_lsn"


WORDS = """
create table t (id int primary key, v text); alter table t replica identity full;
insert into t values (1, 'é'), (2, 'É'), (3, 'e');
"""


@pytest.mark.parametrize(
    ("where", "is_alike"), [("v = 'É'", True), ("upper(v) = 'É'", False), ("v > 'a'", False)]
)
def test_a_filter_means_the_same_rows_in_a_restored_dump(
    where: str, is_alike: bool, new_lake: NewLake, postgres_dsn: NewDatabase
) -> None:
    """The source's locale knows ASCII alone, and the other one has upper case of all letters."""
    table = {"name": "t", "where": where}
    with new_lake(WORDS, table, snapshot={"from": {"kind": "dump"}}) as source:
        name = f"{source.source.info.dbname}_2"
        source.execute(
            f"create database {name} template template0"
            " locale_provider builtin builtin_locale 'C.UTF-8'"
        )
        try:
            database = make_conninfo(source.pipeline.source_dsn, dbname=name)
            begin(source)
            with held_point(source.pipeline) as held:
                assert [*held.tables] == [T]
                dumped(source, held, database, [T])
            lead_to(source, database, str(held.lsn))
            if not is_alike:
                assert waits_for(source) == "dump_other_collation"
                lead_to(source, postgres_dsn(), str(held.lsn))
                assert waits_for(source) == "dump_other_table"
                return
            wait_for(lambda: reached(source, TableState.COPYING))
            source.copy()
            source.catch_up()
            assert source.rows(T) == [(2, "É")]
        finally:
            source.pins.close()
            source.execute(f"drop database {name}")


def test_the_command_names_the_snapshot_and_holds_it(source: Lake, tmp_path: Path) -> None:
    settings = {
        "name": "src",
        "postgres": {"dsn": source.pipeline.source_dsn},
        "tables": list(TABLES),
        "snapshot": {"from": {"kind": "dump"}},
    }
    path = tmp_path / "source.json"
    path.write_text(json.dumps(settings))
    command = [sys.executable, "-m", "cdc_assets", "--config", str(path), "pin", "--hold", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = ""
        while not said.rstrip().endswith("}"):
            said += process.stdout.readline()
        named = json.loads(said)
        assert sorted(named["tables"]) == ["public.a", "public.s", "public.t"]
        assert named["partitions"] == []
        source.execute("begin isolation level repeatable read")
        source.execute(f"set transaction snapshot '{named['snapshot']}'")
        source.execute("rollback")
        process.terminate()
        assert process.wait(30) == 0
    held = source.execute("select distinct lsn::text from _pg2iceberg.held_tables")
    assert held == [(named["lsn"],)]
