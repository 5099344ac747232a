"""Whatever happens to a commit at a REST catalog, or on the way, its rows are in the lake once.

The table has no key: a replay would double rows, and a hole leave some out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cdc_assets.lake.spark.session import open_session
from cdc_assets.operations.copying import mark_for_copy
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support.lake import Lake, NewLake
from cdc_assets_tests.support.rest_catalog import RestCatalog, rest_catalog
from cdc_assets_tests.support.rest_faults import (
    Meets,
    broken,
    done_and_broken,
    done_and_cut_off,
    each_in_turn,
    refused,
    stranger,
    unavailable,
)

pytestmark = pytest.mark.spark

T = TableId("public", "t")
SETUP = """
create table t (v text);
alter table t replica identity full;
insert into t select 'copied ' || i from generate_series(1, 50) i;
"""
CHANGES = """
insert into t values ('twice'), ('twice');
delete from t where ctid = (select min(ctid) from t);
"""
# A merge's: the branch is made, rows are taken out, rows are put in, main moves, and the branch is
# dropped. Of a draft the catalog meets what is published.
COMMITS = {"drafts": 1, "branches": 5}


@pytest.fixture(params=COMMITS)
def commits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    if request.param == "branches":
        monkeypatch.setattr("cdc_assets.lake.publish.table_draft", lambda *_: None)
    return COMMITS[request.param]


@contextmanager
def copied(new_lake: NewLake, folder: Path) -> Iterator[tuple[Lake, RestCatalog]]:
    warehouse = f"file://{folder}/warehouse"
    with rest_catalog(folder, warehouse) as server:
        catalog: dict[str, Any] = {"type": "rest", "uri": server.uri, "warehouse": warehouse}
        lake = {"catalog": {**catalog, "properties": server.access}, "format_version": 2}
        with new_lake(SETUP, {"name": "t", "chunk_pages": 1}, lake=lake) as source:
            source.pin()
            source.copy()
            yield source, server


def change(source: Lake) -> None:
    source.execute(CHANGES)
    source.flush()


@pytest.mark.parametrize("meets", [refused, unavailable, broken, done_and_broken, done_and_cut_off])
def test_each_commit_of_a_merge(
    new_lake: NewLake, tmp_path: Path, commits: int, meets: Meets
) -> None:
    with copied(new_lake, tmp_path) as (source, server):
        for nth in each_in_turn(server, meets, partial(change, source), source.drain_all):
            assert source.equal(T), nth
        assert nth >= commits


@pytest.mark.usefixtures("commits")
def test_a_stranger_before_each_commit_of_a_merge(new_lake: NewLake, tmp_path: Path) -> None:
    with copied(new_lake, tmp_path) as (source, server):
        other = open_session(source.config)
        meets = stranger(other, source.lake_table(T))
        for nth in each_in_turn(server, meets, partial(change, source), source.drain_all):
            assert source.equal(T), nth
        other.stop()


@pytest.mark.parametrize("meets", [refused, done_and_broken, done_and_cut_off])
def test_each_commit_of_a_copy(new_lake: NewLake, tmp_path: Path, meets: Meets) -> None:
    """One that takes the place of a table that is there."""
    with copied(new_lake, tmp_path) as (source, server):

        def pin() -> None:
            mark_for_copy(source.pipeline, [T])
            source.pin()
            source.execute(CHANGES)

        for nth in each_in_turn(server, meets, pin, source.copy):
            source.catch_up()
            assert source.equal(T), nth
