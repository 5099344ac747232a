"""Transactions that read rows, one after another in a session."""

from __future__ import annotations

import gc
import weakref

import pytest

from cdc_assets.pins.reader import snapshot_reader
from cdc_assets.postgres.copy_out import session
from cdc_assets.postgres.copy_out.kinds import TEXT
from cdc_assets.postgres.copy_out.session import Session
from cdc_assets_tests.conftest import NewDatabase

MANY = "select repeat('long ', 200) from generate_series(1, 20000)"


def test_a_read_that_is_left_before_its_end_ends_its_transaction(postgres_dsn: NewDatabase) -> None:
    with snapshot_reader(postgres_dsn()) as open_transaction:
        with open_transaction(None) as run:
            for batch in run(MANY, [TEXT]):
                assert len(batch) < 20_000
                break
        with open_transaction(None) as run:
            assert sum(map(len, run(MANY, [TEXT]))) == 20_000


def test_sessions_of_reads_that_were_left_are_given_up(
    postgres_dsn: NewDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, of = list[weakref.ref[Session]](), session.open_session

    def noted(address: str) -> Session:
        opened.append(weakref.ref(found := of(address)))
        return found

    monkeypatch.setattr(session, "open_session", noted)
    with snapshot_reader(postgres_dsn()) as open_transaction:
        for _ in range(5):
            with open_transaction(None) as run:
                next(run(MANY, [TEXT]))
        gc.collect()
        assert len(opened) == 5
        assert sum(one() is not None for one in opened) == 1  # each has a buffer of 1 MB at least
