"""Rows that are read again from the source, where the lake lacks what an update left out."""

from __future__ import annotations

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
from cdc_assets_tests.support.synchronous import hanging_commits

pytestmark = pytest.mark.spark

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
