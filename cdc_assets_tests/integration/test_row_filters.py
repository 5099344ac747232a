"""``where``: the rows that it leaves out are found nowhere outside the source."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import TableProblem
from cdc_assets.flusher.guard import guard
from cdc_assets.log.states import TableState
from cdc_assets.materializer.drain import drain
from cdc_assets.operations.copying import mark_for_copy
from cdc_assets.pins.pins import Pins
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.readiness.surroundings import review
from cdc_assets.snapshot.coordinator import copy_table
from cdc_assets.verify.sample import sample
from cdc_assets_tests.integration.test_masks import everything
from cdc_assets_tests.security.planted import WORD, leaks
from cdc_assets_tests.support.flusher import flushing
from cdc_assets_tests.support.lake import Lake, NewLake
from cdc_assets_tests.support.waiting import wait_for

pytestmark = pytest.mark.spark

T, KEYED, HISTORY = (TableId("public", name) for name in ("t", "keyed", "history"))
SETUP = f"""
create table t (id int primary key, region text, big text, v text);
alter table t alter big set storage external, replica identity full;
insert into t select i, case when i % 2 = 0 then 'eu' else '{WORD}' end,
  repeat(case when i % 2 = 0 then 'a' else '{WORD}' end, 3000), 'v' from generate_series(1, 300) i;
create table keyed (id int primary key, big text, v text);
alter table keyed alter big set storage external;
insert into keyed select i, repeat(case when i > 10 then 'a' else '{WORD}' end, 3000), 'v'
  from generate_series(1, 20) i;
create table history (region text, v text);
insert into history values ('eu', 'a'), ('{WORD}', 'b');
"""
TABLES: tuple[Any, ...] = (
    {"name": "t", "chunk_pages": 4, "where": "region = 'eu'"},
    {"name": "keyed", "where": "id > 10"},
    {"name": "history", "mode": "append", "where": "region = 'eu'"},
)
EU = f"""
create table t (id int primary key, region text, v text);
alter table t replica identity full;
insert into t values (1, 'eu', 'a'), (2, '{WORD}', 'b');
"""
WHERE = {"name": "t", "where": "region = 'eu'"}


def by_another(source: Lake, where: str | None) -> SourceConfig:
    """The same source, with another ``where``."""
    table = source.config.tables[0].model_copy(update={"where": where})
    return source.config.model_copy(update={"tables": (table,)})


def copied_anew(source: Lake, config: SourceConfig) -> list[tuple[Any, ...]]:
    with Pipeline.open(config) as pipeline:
        mark_for_copy(pipeline, [T])
        pins = Pins(pipeline)
        pins.prepare()
        pins.tick()
        copy_table(pipeline, source.session, T)
        pins.close()
    return source.rows(T)


def test_no_row_that_is_left_out_leaves_the_source(copied_lake: NewLake) -> None:
    with copied_lake(SETUP, *TABLES) as source:
        assert [len(source.rows(table)) for table in (T, KEYED, HISTORY)] == [150, 10, 1]
        source.execute(
            f"update t set v = 'w' where id < 5;"
            f" update t set region = 'eu', v = 'came' where id = 7;"
            f" update t set region = '{WORD}' where id = 8; update t set id = 1000 where id = 10;"
            f" insert into t values (1001, 'eu', 'x', 'y'), (1002, '{WORD}', 'x', '{WORD}');"
            f" delete from t where id in (12, 13); insert into history values ('{WORD}', 'c')"
        )
        source.execute("insert into history values ('eu', 'd')")
        source.execute("update keyed set id = 5 + 100 where id = 15; update keyed set v = 'w'")
        source.execute("update keyed set id = -11 where id = 11")
        source.catch_up()
        rows = {row[0]: row for row in source.rows(T)}
        expected = source.execute("select * from t where region = 'eu'")
        assert sorted(rows.values()) == sorted(expected)
        assert rows[7] == (7, "eu", WORD * 3000, "came"), "of a value that wasn't sent"
        assert sorted(source.rows(KEYED)) == sorted(
            source.execute("select * from keyed where id > 10")
        )
        assert [c.differing for c in source.verify()] == [0, 0, 0]
        with flushing(source.config) as progress:
            wait_for(lambda: progress.state == "streaming")
            for table in (T, KEYED):
                found = sample(source.pipeline, source.session, table, 1000)
                assert (found.skipped, found.differing) == (None, 0)
        source.execute("delete from t where id = 7")
        assert {f.code for f in review(source.config) if f.severity == "error"} == set()


def test_a_value_that_was_not_sent_of_a_row_that_comes_in(copied_lake: NewLake) -> None:
    """Postgres makes an INSERT of the change, which lacks it: no earlier row has it."""
    setup = SETUP.replace(WORD, "b")
    with copied_lake(setup, TABLES[1]) as source:
        source.execute("update keyed set v = 'gone' where id = 12; delete from keyed where id = 12")
        source.execute("update keyed set id = 12 where id = 3")
        source.catch_up()
        rows = {row[0]: row for row in source.rows(KEYED)}
        assert rows[12] == (12, "b" * 3000, "v")
        assert [c.equal for c in source.verify()] == [True]


def test_nothing_that_is_left_out_is_written(copied_lake: NewLake) -> None:
    with copied_lake(EU, WHERE) as source:
        source.execute(f"insert into t values (3, '{WORD}', '{WORD}'), (4, 'eu', 'later')")
        source.execute("update t set v = 'c'; delete from t where id = 3")
        source.catch_up()
        assert source.rows(T) == [(1, "eu", "c"), (4, "eu", "c")]
        texts = list(everything(source))
        assert any("eu" in text for text in texts), "it looks where rows are"
        assert not any(map(leaks, texts))


def test_a_filter_whose_columns_the_identity_lacks_is_refused(new_lake: NewLake) -> None:
    """Published so, Postgres would refuse each UPDATE and DELETE of the application."""
    setup = EU.replace("alter table t replica identity full;", "")
    with new_lake(setup, WHERE) as source:
        found = {finding.code: finding for finding in review(source.config)}
        assert "replica identity (id) lacks" in found["row_filter"].message
        source.pin()
        assert "alter table public.t replica identity full" in str(source.row(T).reason)
        source.execute("update t set v = 'works'; delete from t where id = 2")
        source.execute("alter table t replica identity full")
        source.pin()
        source.copy()
        assert source.rows(T) == [(1, "eu", "works")]


def test_an_identity_that_loses_the_filters_columns_is_withdrawn(copied_lake: NewLake) -> None:
    with copied_lake(EU, WHERE) as source:
        source.execute("alter table t replica identity default")
        with pytest.raises(psycopg.errors.InvalidColumnReference):
            source.execute("update t set v = 'x'")
        with source.pipeline.connect_source("guard") as connection:
            guard(connection, source.config, source.pipeline.store)
        source.execute("update t set v = 'x'")
        assert "row filter uses columns" in str(source.row(T).reason)
        assert "replica identity full" in str(source.row(T).reason)


@pytest.mark.parametrize("where", ["regio = 'eu'", "v", "random() < 1", "id in (select 1)"])
def test_what_postgres_does_not_take_is_named(new_lake: NewLake, where: str) -> None:
    with new_lake(EU, {"name": "t", "where": where}) as source:
        source.pin()
        assert f"Postgres refuses where: {where}" in str(source.row(T).reason)
        source.execute("update t set v = 'works'")


def test_the_publication_of_an_administrator_may_have_it(new_lake: NewLake) -> None:
    made = "create publication cdc_admin for table only t where (region = 'eu')"
    with new_lake(EU, WHERE, publication="cdc_admin") as source:
        source.execute(made)
        before = source.execute("select oid from pg_publication_rel")
        source.pin()
        source.copy()
        assert source.rows(T) == [(1, "eu", "a")]
        assert source.execute("select oid from pg_publication_rel") == before


def test_another_filter_in_the_publication_is_replaced_or_refused(new_lake: NewLake) -> None:
    with new_lake(EU, WHERE) as source:
        source.execute(
            f"create publication {source.config.publication} for table only t where"
            " (region <> 'eu')"
        )
        source.pin()
        source.copy()
        assert source.rows(T) == [(1, "eu", "a")]


def test_a_where_that_changes_parks_until_the_table_is_copied_anew(copied_lake: NewLake) -> None:
    with copied_lake(EU.replace(WORD, "us"), WHERE) as source:
        source.execute("insert into t values (3, 'eu', 'later')")
        source.flush()
        config = by_another(source, "region = 'us'")
        with Pipeline.open(config) as pipeline, pytest.raises(TableProblem, match="filtered_other"):
            drain(pipeline, source.session, T)
        assert source.row(T).state == TableState.PARKED
        assert copied_anew(source, config) == [(2, "us", "b")]
        assert copied_anew(source, by_another(source, None)) == [
            (1, "eu", "a"),
            (2, "us", "b"),
            (3, "eu", "later"),
        ]
        assert copied_anew(source, by_another(source, " ( region='eu' ) "))[0] == (1, "eu", "a")


def test_a_copy_is_made_with_the_filter_of_whoever_asked(copied_lake: NewLake) -> None:
    """A flusher of before the filter would publish, stage and copy all rows."""
    with copied_lake(EU.replace("alter table t replica identity full;", ""), "t") as source:
        source.execute("alter table t replica identity full")
        with Pipeline.open(by_another(source, "region = 'eu'")) as pipeline:
            mark_for_copy(pipeline, [T])
        source.pin()
        assert source.row(T).state == TableState.WAITING
        assert "another columns.mask, mask_salt or where" in str(source.row(T).reason)
        source.pipeline.store.let_go(T, "it was dropped.")
        assert source.row(T).as_wished, "whoever configures it again is free"


def test_a_column_of_the_filter_may_be_renamed(copied_lake: NewLake) -> None:
    with copied_lake(EU, WHERE) as source:
        source.execute("alter table t rename region to area")
        source.execute(f"insert into t values (3, 'eu', 'later'), (4, '{WORD}', 'x')")
        with flushing(source.config) as progress:
            wait_for(lambda: progress.state == "streaming")
        assert source.row(T).row_filter == "(area = 'eu'::text)"
        told = {finding.code: finding for finding in review(source.config)}["row_filter"]
        assert told.severity == "warning"
        assert "by which it goes on" in told.message
        source.catch_up()
        assert [c.equal for c in source.verify()] == [True]
        assert len(source.rows(T)) == 2


def test_a_copy_alone_has_the_filters_rows(copied_lake: NewLake) -> None:
    setup = EU.replace("alter table t replica identity full;", "")
    with copied_lake(setup, WHERE, snapshot={"mode": "snapshot_only"}) as source:
        assert source.rows(T) == [(1, "eu", "a")]
        assert source.row(T).state == TableState.COPIED


def test_a_copy_alone_of_partitions_may_name_the_table(copied_lake: NewLake) -> None:
    setup = """create table t (id int primary key) partition by range (id);
        create table low partition of t for values from (0) to (100);
        insert into t select generate_series(1, 20)"""
    table = {"name": "t", "where": "t.id > 15"}
    with copied_lake(setup, table, snapshot={"mode": "snapshot_only"}) as source:
        assert len(source.rows(T)) == 5


def test_a_history_has_the_values_of_a_row_that_comes_in(copied_lake: NewLake) -> None:
    """Neither NULL, nor those of an earlier row of its key."""
    table = {**TABLES[1], "mode": "append"}
    with copied_lake(SETUP.replace(WORD, "b"), table) as source:
        source.execute("update keyed set v = 'gone' where id = 12; delete from keyed where id = 12")
        source.execute(
            "update keyed set id = 12 where id = 3; update keyed set v = 'w' where id = 12"
        )
        source.execute("update keyed set v = 'x' where id = 13")
        source.execute("update keyed set id = 31 where id = 4")  # and on, before it is merged
        source.execute(
            "update keyed set v = 'y' where id = 31; update keyed set id = 32 where id = 31"
        )
        source.catch_up()
        rows = source.session.sql(
            "select v, big from lake.src.keyed where id = 12 and _xid is not null and _op <> 'D'"
            " order by _lsn"
        ).collect()
        assert [tuple(row) for row in rows] == [
            ("gone", "a" * 3000),
            ("v", "b" * 3000),
            ("w", "b" * 3000),
        ]
        assert not source.session.sql(
            "select * from lake.src.keyed where big is null and _op <> 'D'"
        ).collect()


def test_partitions_have_the_filter_of_their_root(copied_lake: NewLake) -> None:
    setup = """create table t (id int primary key, v text) partition by range (id);
        create table low partition of t for values from (0) to (100);
        create table high (v text, id int not null); alter table t attach partition high default;
        insert into t select i, 'v' from generate_series(50, 150) i"""
    with copied_lake(setup, {"name": "t", "where": "t.id % 2 = 0"}) as source:
        assert len(source.rows(T)) == 51
        source.execute("update t set id = 1001 + id; update t set v = 'w' where id = 1061")
        source.catch_up()
        assert [c.equal for c in source.verify()] == [True]
        assert len(source.rows(T)) == 50
        assert (1061, "w") not in source.rows(T)
