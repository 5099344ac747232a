"""What is known of a complete copy without reading its chunks, which may be many thousands."""

from __future__ import annotations

import pytest

from cdc_assets.observe.figures.rows import table_rows
from cdc_assets.operations.copying import mark_for_copy
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support.lake import Lake, NewLake

pytestmark = pytest.mark.spark

T = TableId("public", "t")
SETUP = """
create table t (id int primary key, v text);
insert into t select i, 'x' from generate_series(1, 1000) i;
create table e (id int primary key);
"""


def _seen(source: Lake) -> dict[str, tuple[str, int, int, int]]:
    return {
        row.name.removeprefix("public."): (
            row.state,
            row.chunks_done,
            row.chunks_total,
            row.rows_copied,
        )
        for row in table_rows(source.pipeline.store)
    }


def test_a_complete_copy_is_known_by_its_sums(new_lake: NewLake) -> None:
    with new_lake(SETUP, "t", "e") as source:
        source.pin()
        assert _seen(source)["t"] == ("copying", 0, 1, 0)
        source.copy()
        complete = {"t": ("streaming", 1, 1, 1000), "e": ("streaming", 1, 1, 0)}
        assert _seen(source) == complete
        source.execute("delete from _pg2iceberg.snapshot_progress")
        assert _seen(source) == complete  # none of them is read
        mark_for_copy(source.pipeline, [T])
        source.pin()
        assert _seen(source)["t"][0] == "copying"
        assert _seen(source)["t"][1:] == (0, 1, 0)
        source.copy()
        assert _seen(source) == complete
