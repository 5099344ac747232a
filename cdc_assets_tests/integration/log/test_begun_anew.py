"""A log that was begun anew, or given up, takes nothing of before."""

from __future__ import annotations

import pytest

from cdc_assets.errors import ReplicationLost
from cdc_assets.log.staged.files import StagedRows
from cdc_assets.log.store import LogStore
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support.flusher import Bench

T = TableId("public", "t")


def is_empty(store: LogStore) -> bool:
    return (store.flushed_lsn(), store.entries(T, 0), store.log_end(T)) == (None, [], 0)


def test_who_registers_gives_it_no_beginning(source: Bench) -> None:
    rows = StagedRows(T, "file:///f", 7, 100)
    with Pipeline.open(source.config("public.t")) as pipeline:
        store = pipeline.store
        store.begin_at(Lsn(8))
        store.begin_at(Lsn(5))
        assert store.flushed_lsn() == Lsn(8)
        store.begin_anew()
        with pytest.raises(ReplicationLost, match="begun anew, or given up"):
            store.register([rows], Lsn(9), Lsn(9), store.server_now())
        assert is_empty(store)
        with pytest.raises(ReplicationLost, match="begun anew, or given up"):
            store.advance(Lsn(9))
        assert is_empty(store)


def test_flushed_lsn_never_moves_back(source: Bench) -> None:
    with Pipeline.open(source.config("public.t")) as pipeline:
        store = pipeline.store
        store.begin_at(Lsn(8))
        store.advance(Lsn(9))
        store.advance(Lsn(8))
        assert store.flushed_lsn() == Lsn(9)
