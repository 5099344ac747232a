"""Tables that an earlier version copied, whose sessions found types in a search path."""

from __future__ import annotations

import pytest

from cdc_assets.errors import TableProblem
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.session import connect
from cdc_assets_tests.support.lake import NewLake

pytestmark = pytest.mark.spark

SAME, OTHER = TableId("public", "same"), TableId("public", "other")
SETUP = """
create type mood as enum ('sad', 'glad');
create schema later; create type later.mood as enum ('mad', 'glad');
create table same (id int primary key, m mood);
create table other (id int primary key, m mood);
insert into same values (1, 'sad'); insert into other values (1, 'sad');
"""


def test_a_type_that_was_written_without_its_schema_is_the_same_only_if_it_is(
    new_lake: NewLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_lake(SETUP, "same", "other") as source:
        with monkeypatch.context() as earlier:
            earlier.setattr(connect, "OWN_NAMES", {"search_path": "pg_catalog,public"})
            source.pin()
            source.copy()
        row = source.row(SAME)
        assert row.columns[1].type == "mood"
        source.execute("alter table same add column n int; update same set n = 7")
        source.execute(
            "alter table other alter m type later.mood using 'mad';"
            " insert into other values (2, 'glad')"
        )
        source.flush()
        source.drain(SAME)
        assert source.rows(SAME) == [(1, "sad", 7)]
        # Postgres doesn't send what this made of its rows.
        with pytest.raises(TableProblem, match=r"m changed its type from mood to later\.mood"):
            source.drain(OTHER)
