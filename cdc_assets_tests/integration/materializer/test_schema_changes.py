"""Schema changes in the stream: applied between the rows before and after, by real DDL.

Every kind has a table of its own, and all of them go through one flush: a drain costs seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from cdc_assets.errors import TableProblem
from cdc_assets.lake.spark.session import open_session
from cdc_assets.log.copies.chunks import restart_copy
from cdc_assets.log.relation import told_by_catalog
from cdc_assets.materializer import drain
from cdc_assets.materializer.schema.alter import follow
from cdc_assets.operations import merging, running
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.integration.materializer.schema_kinds import (
    ALL,
    HARD,
    KINDS,
    PLAIN,
    ROWS,
    Kind,
)
from cdc_assets_tests.support.lake import Lake, NewLake

pytestmark = pytest.mark.spark


@pytest.fixture
def source(request: pytest.FixtureRequest, copied_lake: NewLake) -> Iterator[Lake]:
    kinds = [kind for kind in KINDS if kind.name in request.param]
    setup = ";".join(kind.sql(f"{kind.create}; {kind.rows}") for kind in kinds)
    with copied_lake(setup, *request.param) as opened:
        yield opened


def _lake_rows(source: Lake, table: TableId) -> tuple[list[str], list[dict[str, Any]]]:
    """The columns and the rows, as pyiceberg reads them; Spark must read the same."""
    loaded = source.lake_table(table).load()
    assert loaded is not None
    rows = loaded.scan().to_arrow()
    spark = source.session.table(source.lake_table(table).sql_name).toArrow()
    assert sorted(rows.column_names) == sorted(spark.column_names)
    assert sorted(map(repr, rows.select(sorted(rows.column_names)).to_pylist())) == sorted(
        map(repr, spark.select(sorted(rows.column_names)).to_pylist())
    )
    return rows.column_names, rows.to_pylist()


def _kinds(source: Lake) -> list[Kind]:
    return [kind for kind in KINDS if TableId("public", kind.name) in source.tables]


def _check(source: Lake) -> None:
    # It knows the end of the log, and brings what no row has told until then.
    assert {str(c.table): (c.problem, c.keys) for c in source.verify() if not c.equal} == {}
    for kind in _kinds(source):
        columns, _ = _lake_rows(source, TableId("public", kind.name))
        there = source.execute(
            "select attname from pg_attribute where attnum > 0 and not attisdropped"
            f" and attrelid = '{kind.name}'::regclass"
        )
        assert sorted(columns) == sorted([*(name for (name,) in there), *kind.extra]), kind.name


@pytest.mark.parametrize("source", [ALL], ids=["all"], indirect=True)
def test_every_kind_of_schema_change_is_applied_in_its_place(source: Lake) -> None:
    for kind in _kinds(source):
        kind.run(source)
    source.catch_up()
    _check(source)
    _, rows = _lake_rows(source, TableId("public", "dropped"))
    assert {row["id"]: row["v"] for row in rows} == {1: "before", 2: None, 3: "v3", 5: "v5"}
    _, rows = _lake_rows(source, TableId("public", "again"))
    assert {row["id"]: row["v__dropped_2"] for row in rows} == {
        1: "before",
        2: None,
        3: None,
        4: "v4",
        5: "v5",
    }
    assert {row["id"]: row["v__dropped_4"] for row in rows} == {
        **dict.fromkeys((1, 3, 4, 5)),
        2: 7,
    }


@pytest.mark.parametrize("source", [HARD], ids=["hard"], indirect=True)
def test_a_writer_that_dies_between_any_two_steps_costs_nothing(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in _kinds(source):
        kind.run(source)
    source.flush()
    real = source.session

    class Dying:
        """A session that dies after the next statement that alters a table, or publishes."""

        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

        def sql(self, statement: str) -> object:
            done = real.sql(statement)
            if "alter table" in statement and "branch" not in statement:
                raise KeyboardInterrupt
            return done

    deaths = 0
    for table in source.tables:
        for _ in range(40):
            try:
                drain.drain(source.pipeline, Dying(), table)  # type: ignore[arg-type]
                break
            except KeyboardInterrupt:
                deaths += 1
        else:
            pytest.fail(f"{table} makes no progress")
    assert deaths > 20
    source.drain_all()
    _check(source)


@pytest.mark.parametrize("source", [["quoted"]], ids=["late"], indirect=True)
def test_a_writer_that_was_taken_for_dead_alters_nothing_any_more(source: Lake) -> None:
    (table,) = source.tables
    source.execute(
        "alter table quoted add c int default 5; insert into quoted values (10, 'x', 1, 6)"
    )
    source.flush()
    session = open_session(source.config)
    added, goes_on = threading.Event(), threading.Event()

    class Late:
        """A session whose client sleeps after the column was added."""

        def __getattr__(self, name: str) -> object:
            return getattr(session, name)

        def sql(self, statement: str) -> object:
            done = session.sql(statement)
            if "add column" in statement:
                added.set()
                assert goes_on.wait(120)
            return done

    errors: list[BaseException] = []

    def work(own: Pipeline) -> None:
        try:
            drain.drain(own, Late(), table)  # type: ignore[arg-type]
        except psycopg.OperationalError as error:
            errors.append(error)

    with Pipeline.open(source.config) as own:
        thread = threading.Thread(target=work, args=(own,))
        thread.start()
        assert added.wait(120)
        pid = own.store.connection.info.backend_pid
        source.execute(f"select pg_terminate_backend({pid}, 5000)")  # and its locks are free
        source.drain(table)
        goes_on.set()
        thread.join(120)
    session.stop()
    assert len(errors) == 1
    source.drain(table)
    assert source.rows(table) == sorted(source.execute("select * from quoted"), key=repr)


def test_what_cant_be_done_in_place_parks_this_table_only(copied_lake: NewLake) -> None:
    setup = "; ".join(f"{PLAIN}; {ROWS}".replace("{t}", name) for name in ("odd", "fine", "full_"))
    setup += "; alter table full_ replica identity full"
    hides = {"name": "hides", "columns": {"exclude": ["v"]}}
    setup += f"; {PLAIN}; {ROWS}".replace("{t}", "hides")
    with copied_lake(setup, "odd", "fine", "full_", hides) as source:
        odd, fine, hidden = (TableId("public", name) for name in ("odd", "fine", "hides"))
        source.execute("update odd set v = 'seen' where id = 1")
        source.execute("alter table odd alter n type text using n || ' pieces'")
        source.execute("update odd set v = 'unseen' where id = 2; update fine set v = 'x'")
        source.execute("alter table hides rename v to w; update hides set n = 5")
        source.flush()
        with pytest.raises(TableProblem, match=r"column n changed its type.*resync public\.odd"):
            source.drain(odd)
        with pytest.raises(TableProblem, match=r"column v, which columns\.exclude names"):
            source.drain(hidden)
        source.drain(fine)
        source.execute("alter table full_ drop constraint full__pkey")
        full = next(c for c in source.verify() if str(c.table) == "public.full_")
        assert "its key changed, which the stream doesn't tell" in (full.problem or "")
        stale = source.lake_table(hidden)
        told = told_by_catalog(source.source, stale.row, source.config.publication)
        restart_copy(source.pipeline.store, stale.row)
        with pytest.raises(TableProblem, match=r"column v, which columns\.exclude names"):
            follow(source.pipeline, source.session, stale, stale.state(), told)
        row = source.row(hidden)
        assert row.state == "waiting"  # the new copy is not concerned
        row = source.row(odd)
        assert (row.state, "resync" in (row.reason or "")) == ("parked", True)
        assert (1, "seen", 1) in source.rows(odd)
        assert len(source.rows(fine)) == 5
        restart_copy(source.pipeline.store, row)
        source.pin()
        source.tables = [odd, fine]
        source.copy()
        source.drain(odd)
        assert (2, "unseen", "2 pieces") in source.rows(odd)
        assert [c.equal for c in source.verify()] == [True, True]


def test_a_column_that_comes_during_a_copy_is_in_the_lake(new_lake: NewLake) -> None:
    setup = f"{PLAIN}; {ROWS}".replace("{t}", "t")
    with new_lake(setup, "t") as source:
        source.pin()
        source.execute("alter table t add c int default 3; insert into t values (9, 'x', 1, 4)")
        source.copy()
        source.catch_up()
        table = source.tables[0]
        assert source.rows(table)[0] == (1, "v1", 1, 3)
        assert [c.equal for c in source.verify()] == [True]
        # No row follows this one; the commands bring it all the same, once.
        source.execute("alter table t add d text default 'later'; alter table t rename v to w")
        with running.Spark(source.config) as spark:
            merging.materialize(source.pipeline, spark, [table])
            assert _lake_rows(source, table)[0] == ["id", "w", "n", "c", "d"]
            assert source.rows(table)[0] == (1, "v1", 1, 3, "later")
            before = source.snapshots(table)
            assert merging.materialize(source.pipeline, spark, [table]) == []
        assert source.snapshots(table) == before


def test_a_column_that_came_and_went_before_a_merge_tells_no_rows_apart(
    copied_lake: NewLake,
) -> None:
    """Nobody knows what older rows showed in it: without a key they were not found again."""
    setup = ";".join(
        f"create table {t} (v text); alter table {t} replica identity full;"
        f" insert into {t} select 'v' || i % 3 from generate_series(1, 9) i"
        for t in ("t", "alone")
    )
    with copied_lake(setup, "t", "alone") as source:
        source.execute("alter table t add c int default 5")
        source.execute("update t set v = 'other' where ctid = '(0,4)'")
        source.execute("delete from t where ctid = '(0,5)'")
        source.execute("alter table t drop c, add d text")
        source.execute("update t set d = 'x' where v = 'v0'")
        source.execute("alter table alone add c int default 5; alter table alone drop v")
        source.execute("delete from alone where ctid = '(0,4)'")
        source.execute("insert into alone values (1)")
        source.execute("alter table alone drop c, add d text")
        source.execute("insert into alone values ('y')")
        source.catch_up()
        for table, columns in zip(source.tables, ("v, d", "d"), strict=True):
            rows = source.session.table(source.lake_table(table).sql_name)
            found = [tuple(row) for row in rows.selectExpr(*columns.split(", ")).collect()]
            wanted = source.execute(f"select {columns} from {table}")
            assert sorted(found, key=repr) == sorted(wanted, key=repr)


def test_a_column_that_was_widened_since_is_read_as_far_as_it_goes(copied_lake: NewLake) -> None:
    """Its values in older rows are read at the source, which may hold what is still to come."""
    setup = "create table t (id int primary key); insert into t values (1), (2), (3)"
    with copied_lake(setup, "t") as source:
        source.execute("alter table t add c int default 37, add d numeric(4,2) default 1.5")
        source.execute("insert into t values (4, 4, 4)")
        source.execute("alter table t alter c type bigint, alter d type numeric(12,2)")
        source.execute("alter table t alter id type bigint")
        source.execute("insert into t values (5000000000, 5, 5)")
        source.execute("update t set c = 5000000000, d = 5000000000 where id = 2")
        source.catch_up()
        [table] = source.tables
        assert source.rows(table) == sorted(source.execute("select * from t"), key=repr)
