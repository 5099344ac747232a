"""A row that a merge reads again is as of now: no mark of before has it."""

from __future__ import annotations

import psycopg
import pytest

from cdc_assets.log.asked import marks as log
from cdc_assets.log.asked.marks import MarkState
from cdc_assets_tests.integration.snapshot.sources import T
from cdc_assets_tests.support.incremental import INCREMENTAL, TOAST, between_parts, copy_here
from cdc_assets_tests.support.lake import NewLake

pytestmark = pytest.mark.spark

MOVED = "update t set v = repeat('m', 300) where id > 19990"


def test_a_table_whose_merge_below_the_mark_read_a_row_of_above_it_is_missed(
    new_lake: NewLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update left a value out that neither the log nor the lake has."""
    with new_lake(TOAST, {"name": "t", "chunk_pages": 64}, snapshot=INCREMENTAL) as lake:
        lake.execute("vacuum (index_cleanup on) t")  # the first pages have room now
        dsn, store = lake.pipeline.source_dsn, lake.pipeline.store
        lake.pin()

        def move(part: int) -> None:
            if part == 2:
                with psycopg.connect(dsn, autocommit=True) as session:
                    session.execute(MOVED.encode())

        with between_parts(monkeypatch, move):
            copy_here(lake)
        lake.flush()
        log.make(store, "before", lake.tables)
        [made] = log.marks(store)
        assert [table.state for table in made.tables] == [MarkState.PENDING]
        lake.execute("update t set v = 'later' where id = 19992")
        lake.drain(T)  # in one turn it merges, and comes to the mark
        [made] = log.marks(store)
        [marked] = made.tables
        assert marked.state == MarkState.MISSED
        assert "later moment" in (marked.reason or "")
        assert "mark_before" not in lake.lake_table(T).loaded().metadata.refs
        log.make(store, "after", lake.tables)
        lake.catch_up()
        assert lake.equal(T)
