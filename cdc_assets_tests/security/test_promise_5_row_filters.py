"""Whoever writes to the log can't have our statements read, or do, what the filter doesn't say."""

from __future__ import annotations

from typing import Any

import pytest

from cdc_assets.errors import TableProblem
from cdc_assets.log.states import TableState
from cdc_assets.pins import pins
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.catalog import describe
from cdc_assets.readiness.source.planning import refuse_row_filter
from cdc_assets_tests.integration.test_row_filters import EU, WHERE, T, copied_anew
from cdc_assets_tests.support.lake import NewLake

pytestmark = pytest.mark.spark


def test_it_does_not_say_which_rows_are_read(copied_lake: NewLake) -> None:
    with copied_lake(EU, WHERE) as source:
        source.execute("update _pg2iceberg.tables set row_filter = 'true) or (true'")
        assert [c.equal for c in source.verify()] == [True]
        assert copied_anew(source, source.config) == [(1, "eu", "a")]
        source.execute("update _pg2iceberg.tables set row_filter = null")
        source.execute("insert into t values (9, 'eu', 'later')")
        assert not any(c.equal for c in source.verify())
        assert "has a row filter for it" in str(source.row(T).reason)


@pytest.mark.parametrize("said", ["true); drop table public.kept; --", "true"])
def test_it_makes_no_statement(new_lake: NewLake, said: str) -> None:
    with new_lake(f"{EU}; create table kept ()", WHERE) as source:
        source.pin()
        source.execute(
            "update _pg2iceberg.tables set state = 'waiting', snapshot_lsn = null, pin = null,"
            f""" mask_wish = '{{"q": "r"}}', filter_wanted = '{said}'"""
        )
        source.execute(f"alter publication {source.config.publication} drop table t")
        source.pin()
        assert source.execute("select to_regclass('public.kept')")[0][0] == "kept"
        found = source.execute("select pg_get_expr(prqual, prrelid) from pg_publication_rel")
        assert found in ([], [("(region = 'eu'::text)",)])


def test_it_does_not_say_that_there_is_no_filter(new_lake: NewLake) -> None:
    with new_lake(EU, WHERE) as source:
        source.pin()
        source.execute("update _pg2iceberg.tables set inserts_only = true, row_filter = null")
        with pytest.raises(TableProblem, match="no row filter for it, and the configuration one"):
            source.copy()
        assert source.row(T).state == TableState.COPYING


CAST = """
create type mood as enum ('eu');
create function spied(mood) returns text language plpgsql immutable as
  $$ begin raise notice 'SPIED'; return 'eu'; end $$;
create cast (mood as text) with function spied(mood) as implicit;
create table t (id int primary key, region mood, v text); alter table t replica identity full;
insert into t values (1, 'eu', 'a');
"""


@pytest.mark.parametrize("mode", ["initial", "snapshot_only"])
def test_nobodys_code_runs_with_our_rights(new_lake: NewLake, mode: str) -> None:
    with new_lake(CAST, WHERE, snapshot={"mode": mode}) as source:
        source.pin()
        assert "isn't Postgres's own" in str(source.row(T).reason)
        assert source.row(T).state == TableState.PARKED


def test_a_filter_is_the_publications_at_the_moment_of_the_pin(
    new_lake: NewLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody may replace it after we looked, and before the snapshot."""
    made: Any = vars(pins)["publish_tables"]
    with new_lake(EU, WHERE) as source:

        def publish(connection: Any, *about: Any) -> Any:
            found = made(connection, *about)
            name = source.config.publication
            source.execute(f"alter publication {name} set table t where (region <> 'eu')")
            return found

        monkeypatch.setitem(vars(pins), "publish_tables", publish)
        source.pin()
        assert source.row(T).state == TableState.WAITING
        monkeypatch.undo()
        source.pin()
        source.copy()
        assert source.rows(T) == [(1, "eu", "a")]


def test_both_publications_would_send_the_rows_of_either(copied_lake: NewLake) -> None:
    with copied_lake(EU, WHERE) as source:
        source.execute(f"alter publication {source.config.publication}_inserts add table t")
        source.flush()
        assert "both publications of the source have it" in str(source.row(T).reason)


def test_a_role_that_reads_some_columns_may_filter_by_them(new_lake: NewLake) -> None:
    table = {**WHERE, "columns": {"exclude": ["v"]}}
    with new_lake(EU, table) as source, Pipeline.open(source.config) as pipeline:
        role = "cdc_partial"
        source.execute(f"create role {role}; grant select (id, region, ctid) on t to {role}")
        try:
            with pipeline.connect_source("test") as connection:
                connection.execute(f"set role {role}".encode())
                found = describe(connection, T)
                refuse_row_filter(connection, source.config, found, [T], inserts_only=False)
        finally:
            source.execute(f"drop owned by {role}; drop role {role}")
