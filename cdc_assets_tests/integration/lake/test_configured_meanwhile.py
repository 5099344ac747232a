"""Columns that the configuration changes while a table is copied, or before its first merge."""

from __future__ import annotations

from typing import Any

import pytest

from cdc_assets.config.source import SourceConfig
from cdc_assets.config.tables import ColumnsConfig
from cdc_assets.errors import TableProblem
from cdc_assets.log.copies.chunks import chunks
from cdc_assets.log.states import TableState
from cdc_assets.materializer.drain import drain
from cdc_assets.operations.copying import mark_for_copy
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.snapshot.coordinator import copy_tables
from cdc_assets.snapshot.landing import Landing
from cdc_assets_tests.support.lake import Lake, NewLake

pytestmark = pytest.mark.spark

T, OTHER = TableId("public", "m"), TableId("public", "other")
SETUP = "".join(
    f"create table {name} (id int primary key, a text, b text, c int); insert into {name}"
    " select i, repeat('a', 900), repeat('b', 900), i from generate_series(1, 60) i;"
    for name in ("m", "other")
)
SWAPPED: dict[str, Any] = {"rename": {"a": "b", "b": "a"}}


def _with(source: Lake, columns: dict[str, Any]) -> SourceConfig:
    first, *rest = source.config.tables
    first = first.model_copy(update={"columns": ColumnsConfig(**columns)})
    return source.config.model_copy(update={"tables": (first, *rest)})


@pytest.mark.parametrize(
    "columns",
    [SWAPPED, {"rename": {"a": "x"}}, {"exclude": ["b"]}, {"types": {"c": "string"}}],
)
def test_a_copy_has_the_columns_that_it_was_begun_with(
    new_lake: NewLake, columns: dict[str, Any]
) -> None:
    with new_lake(SETUP, {"name": "m", "chunk_pages": 2}, "other") as source:
        source.pin()
        keys = sorted(chunk.key for chunk in chunks(source.pipeline.store, T, 1))
        assert copy_tables(source.pipeline, source.session, [T], only=keys[:3]) == {}
        changed = _with(source, columns)
        with Pipeline.open(changed) as pipeline:
            failed = copy_tables(pipeline, source.session, [T, OTHER])
        assert failed.keys() == {T}
        assert "isn't what it was when its copy began. Put it back, or" in str(failed[T])
        assert source.row(OTHER).state == TableState.STREAMING
        if "exclude" in columns:  # the way out: no row may keep what is excluded now
            with Pipeline.open(changed) as pipeline:
                mark_for_copy(pipeline, [T])
            source.pin()
            with Pipeline.open(changed) as pipeline:
                assert copy_tables(pipeline, source.session, [T]) == {}
            assert source.equal(T, "id, a, c")
        else:
            assert copy_tables(source.pipeline, source.session, [T]) == {}
            assert source.equal(T)


def test_a_copy_that_pyiceberg_refuses_leaves_the_others_alone(
    new_lake: NewLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Landing, written: object) -> None:
        if self.lake.row.table == T:
            raise ValueError("Mismatch in fields")
        land(self, written)  # type: ignore[arg-type]

    land = Landing.land
    with new_lake(SETUP, "m", "other") as source:
        source.pin()
        monkeypatch.setattr(Landing, "land", refused)
        failed = copy_tables(source.pipeline, source.session, [T, OTHER])
        assert isinstance(failed.pop(T), TableProblem)
        assert failed == {}
        assert source.row(OTHER).state == TableState.STREAMING


@pytest.mark.parametrize("renamed", [{"a": "b", "b": "a"}, {"a": "x"}])
def test_a_copy_of_partitions_may_be_renamed_before_its_first_merge(
    copied_lake: NewLake, renamed: dict[str, str]
) -> None:
    setup = "create table m (id int primary key, a text, b text); insert into m values"
    partitioned = {"name": "m", "partition_by": ["bucket(2, id)"]}
    with copied_lake(f"{setup} (1, 'a', 'b'), (2, 'a', 'b')", partitioned) as source:
        source.execute("insert into m values (3, 'a', 'b')")
        source.flush()
        with Pipeline.open(_with(source, {"rename": renamed})) as pipeline:
            drain(pipeline, source.session, T)
        assert source.rows(T) == [(i, "a", "b") for i in (1, 2, 3)]
        names = source.session.table(source.lake_table(T).sql_name).columns
        assert names == ["id", renamed["a"], renamed.get("b", "b")]
