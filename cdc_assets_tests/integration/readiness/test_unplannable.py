"""A table that Postgres can't plan a query of in our sessions: named, and the others go on.

An index calls a function whose body has a name without a schema; our sessions find names in
``pg_catalog`` alone.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from cdc_assets.config.source import parse_config
from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.errors import CopyRestarted, TableProblem
from cdc_assets.materializer.workers.follower import Follower, Listener
from cdc_assets.pins import taking
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.session.connect import connect
from cdc_assets.readiness.source import planning
from cdc_assets.readiness.source.server import preflight
from cdc_assets.snapshot.coordinator import copy_table
from cdc_assets.snapshot.table_copy import TableCopy
from cdc_assets_tests.support.flusher import bench
from cdc_assets_tests.support.lake import NewLake
from cdc_assets_tests.support.waiting import wait_for

BAD, GOOD = TableId("app", "bad"), TableId("app", "good")
SETUP = """
create schema app;
create table app.words (w text);
create function app.helper(v text) returns text language sql immutable as 'select upper(v)';
create function app.shown(v text) returns text language sql immutable as 'select v';
create function app.fine(v text) returns text language sql immutable as 'select v';
create table app.good (id int primary key, v text);
create index on app.good (app.fine(v));
create table app.bad (id int primary key, v text);
create index on app.bad (app.shown(v), app.fine(v));
insert into app.good select g, 'v' || g from generate_series(1, 50) g;
insert into app.bad select g, 'v' || g from generate_series(1, 50) g;
"""
# As any version lets a body become; before 17 an index may be made with it.
FUNCTION = """
set search_path = app, public;
create or replace function app.shown(v text) returns text language sql immutable
    as 'select helper(v)';
reset search_path
"""
# What it looks for is a table: the error is the one of a table that is gone.
TABLE = FUNCTION.replace("helper(v)", "v || (select max(w) from words)")
STATISTICS = """
create table app.bad_1 (id int, v text) partition by range (id);
drop index app.bad_shown_fine_idx; alter table app.bad rename to bad_2;
alter table app.bad_1 rename to bad;
alter table app.bad attach partition app.bad_2 for values from (0) to (1000);
alter table app.bad add primary key (id);
create statistics app.known on (app.shown(v)), id from app.bad_2
"""


# Its error is one of the server's own, which other statements may have for other reasons.
KIND = """
create or replace function app.shown(v text) returns text language plpgsql immutable
    as $$ begin raise 'deep' using errcode = '54001'; end $$
"""


def test_an_error_of_any_kind_is_that_tables_alone(
    any_postgres: EmbeddedPostgres, tmp_path: Path
) -> None:
    """Constant calls of immutable functions are computed when a query is planned."""
    with bench(any_postgres.start(), "unplannable_kind", tmp_path) as made:
        made.execute(SETUP + "create index on app.bad (id) where app.shown('a') = 'a';" + KIND)
        config = made.config("app.bad", "app.good")
        with connect(made.dsn) as source:
            assert [
                f.table for f in preflight(source, config) if f.code == "table_unplannable"
            ] == ["app.bad"]
        made.flush(config)
        assert set(made.parked()) == {"app.bad"}
        assert "54001" in made.parked()["app.bad"]


@pytest.mark.parametrize("more", [FUNCTION, TABLE, STATISTICS + ";" + FUNCTION])
def test_such_a_table_is_named_before_anything_is_copied(
    any_postgres: EmbeddedPostgres, tmp_path: Path, more: str
) -> None:
    with bench(any_postgres.start(), "unplannable", tmp_path) as made:
        made.execute(SETUP + more)
        config = made.config("app.bad", "app.good")
        with connect(made.dsn) as source:
            (found,) = [f for f in preflight(source, config) if f.code == "table_unplannable"]
        assert (found.table, found.severity) == ("app.bad", "error")
        assert "app.shown(text)" in found.message and "app.fine" not in found.message
        made.flush(config)
        assert set(made.parked()) == {"app.bad"}
        assert "alter function app.shown(text) set search_path = app" in made.parked()["app.bad"]
        # The remedy is pasted as it is.
        made.execute(found.remedy)
        with connect(made.dsn) as source:
            assert [f for f in preflight(source, config) if f.code == "table_unplannable"] == []
        made.flush(config)
        assert made.parked() == {}


def test_tables_that_take_long_are_planned_by_themselves(
    any_postgres: EmbeddedPostgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one slow table keeps fifty from being pinned, for good."""
    slow = "set local statement_timeout = '1ms'; select pg_sleep(1)"
    for module in (taking, planning):
        monkeypatch.setattr(module, "AT_ONCE_LIMITS", slow)
    with bench(any_postgres.start(), "slow", tmp_path) as made:
        made.execute(SETUP)
        settings = made.settings("app.bad", "app.good") | {"snapshot": {"mode": "initial"}}
        made.flush(parse_config(settings, "test"))
        assert made.parked() == {}
        found = made.ask_log("select state, count(*) from _pg2iceberg.tables group by state")
        assert found == [("copying", 2)]


def test_locks_of_tables_that_are_planned_together_are_held_for_a_moment(
    any_postgres: EmbeddedPostgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each transaction ends once it has taken long, and all are planned all the same."""
    with bench(any_postgres.start(), "moment", tmp_path) as made:
        made.execute(
            "create function sleeps() returns boolean immutable language plpgsql"
            " as $$ begin perform pg_catalog.pg_sleep(0.06); return true; end $$"
        )
        tables = [TableId("public", f"s{i}") for i in range(6)]
        for table in tables:
            made.execute(
                f"create table {table} (id int); create index on {table} (id) where sleeps()"
            )
        begun = list[str]()
        # On a busy machine one may take longer than is granted to it among others.
        monkeypatch.setattr(planning, "AT_ONCE_LIMITS", "set local statement_timeout = '10s'")
        with connect(made.dsn) as source:
            original = source.transaction

            def counted(*, force_rollback: bool = False) -> AbstractContextManager[object]:
                begun.append("one")
                return original(force_rollback=force_rollback)

            monkeypatch.setattr(source, "transaction", counted)
            assert planning.plannable(source, tables) == set(tables)
        assert 1 < len(begun) <= len(tables)


def test_a_heap_whose_rows_cannot_be_looked_at_leaves_the_other_tables_going(
    any_postgres: EmbeddedPostgres, tmp_path: Path
) -> None:
    """Every followed table is looked at together: the error is that one's alone."""
    with bench(any_postgres.start(), "unlooked", tmp_path) as made:
        made.execute(SETUP + STATISTICS)
        made.execute(
            "create table app.other (id int, v text, primary key (id)) partition by range (id);"
            "create table app.other_1 partition of app.other for values from (0) to (1000);"
            "insert into app.other values (1)"
        )
        config = made.config("app.bad", "app.good", "app.other")
        made.flush(config)
        made.execute("vacuum full app.bad_2")
        made.execute(FUNCTION + "; truncate app.other_1; insert into app.other values (2)")
        made.execute("insert into app.good values (51, 'x')")
        for _ in range(2):  # judged once the log is where the source was
            made.flush(config)
        assert {t: r.split(":")[0] for t, r in made.parked().items()} == {
            "app.bad": "rows_replaced",
            "app.other": "rows_replaced",
        }
        assert made.ids("app.good") == ["51"]


@pytest.mark.spark
def test_one_that_becomes_so_before_its_copy_ends_is_parked_and_not_begun_anew(
    new_lake: NewLake,
) -> None:
    with new_lake(SETUP, "app.bad", "app.good") as source:
        source.pin()
        row = source.row(GOOD)
        # One that was altered, by somebody who has it locked yet, begins anew all the same.
        copy = TableCopy(source.pipeline, source.session, row, None, lambda _: None)
        with source.source.transaction():
            source.execute("alter table app.good alter v set statistics 10, add w text")
            with pytest.raises(CopyRestarted):
                copy.judge({"changed": "it has another column"})
        source.pin()
        source.execute(TABLE)
        copy_table(source.pipeline, source.session, GOOD)
        with pytest.raises(TableProblem, match=r"alter function app\.shown"):
            copy_table(source.pipeline, source.session, BAD)
        row = source.row(BAD)
        assert (row.state, row.epoch) == ("parked", 1)


@pytest.mark.spark
def test_a_worker_goes_on_with_the_other_tables(
    copied_lake: NewLake, caplog: pytest.LogCaptureFixture
) -> None:
    with copied_lake(SETUP, "app.bad", "app.good") as source:
        # What its rows show in the new column is asked of them.
        source.execute("alter table app.bad add w text default pg_catalog.clock_timestamp()::text")
        source.execute("update app.bad set v = 'x' where id = 1; delete from app.good where id > 1")
        source.execute(FUNCTION)
        source.flush()
        stop, raised = threading.Event(), list[Exception]()

        def work() -> None:
            try:
                with Pipeline.open(source.config) as pipeline:
                    Follower([BAD, GOOD], stop, Listener(lambda _: None)).work(
                        pipeline, source.session
                    )
            except Exception as error:  # noqa: BLE001 - the test tells
                raised.append(error)

        worker = threading.Thread(target=work)
        worker.start()
        try:
            wait_for(lambda: raised or f"{BAD}: UndefinedFunction" in caplog.text)
            wait_for(lambda: raised or source.rows(GOOD) == [(1, "v1")])
        finally:
            stop.set()
            worker.join()
        assert raised == []
