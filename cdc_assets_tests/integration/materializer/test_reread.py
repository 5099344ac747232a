"""Rows that are read again from the source, where the lake lacks what an update left out."""

from __future__ import annotations

import os

import psycopg
import pytest

from cdc_assets.errors import TableProblem
from cdc_assets.flusher.flusher import run
from cdc_assets.materializer import reread
from cdc_assets.materializer.drain import drain
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.slots import current_lsn
from cdc_assets_tests.integration.snapshot.sources import T
from cdc_assets_tests.support.incremental import INCREMENTAL, TOAST, between_parts, copy_here
from cdc_assets_tests.support.lake import NewLake
from cdc_assets_tests.support.peak_memory import begin_anew, peak_bytes
from cdc_assets_tests.support.synchronous import hanging_commits

pytestmark = pytest.mark.spark

# 200 MB, which an update stages in as good as none.
WIDE = """
create table t (id int primary key, n int, v text);
alter table t alter v set storage external;
insert into t select i, 0, repeat(md5(i::text), case when i > 300 then 80000 else 2000 end)
  from generate_series(1, 370) i;
"""
MOVED = "update t set v = repeat('m', 300) where id > 19990"
LATER = "update t set v = 'later' where id = 19992"


def test_invariant_8_a_row_is_not_read_again_before_its_changes_are_visible(
    new_lake: NewLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change whose COMMIT hangs is in the log before any snapshot shows it."""
    with new_lake(TOAST, {"name": "t", "chunk_pages": 64}, snapshot=INCREMENTAL) as lake:
        lake.execute("vacuum (index_cleanup on) t")  # the first pages have room now
        dsn = lake.pipeline.source_dsn
        lake.pin()

        def move(part: int) -> None:
            if part == 2:
                with psycopg.connect(dsn, autocommit=True) as session:
                    session.execute(MOVED.encode())

        with between_parts(monkeypatch, move):
            copy_here(lake)
        with hanging_commits(dsn, LATER), Pipeline.open(lake.config) as pipeline:
            with psycopg.connect(dsn, autocommit=True) as source:
                run(lake.config, until=current_lsn(source))
            monkeypatch.setattr(reread, "VISIBLE_SECONDS", 0.3)
            with pytest.raises(TableProblem, match=r"doesn't show transaction .* SyncRep"):
                drain(pipeline, lake.session, T)
        lake.catch_up()
        assert lake.execute("select v from t where id = 19992") == [("later",)]
        assert lake.equal(T)


@pytest.mark.parametrize("mode", ["mirror", "append", "soft_delete"])
def test_rows_that_are_read_again_are_as_large_as_they_like(new_lake: NewLake, mode: str) -> None:
    table = {"name": "t", "mode": mode}
    with new_lake(WIDE, table, snapshot={"mode": "never"}) as lake:
        lake.pin()
        lake.execute("update t set n = 1")
        lake.flush()
        before = begin_anew()
        assert lake.drain(T).repaired == 370
        grown = peak_bytes(os.getpid()) - before
        print(f"the client took {grown / 1e6:.0f} MB")  # noqa: T201
        name = lake.lake_table(T).sql_name
        found = lake.session.sql(f"select id, n, md5(v) from {name} order by id").collect()
        assert [tuple(row) for row in found] == lake.execute(
            "select id, n, md5(v) from t order by id"
        )
        assert grown < 600e6
