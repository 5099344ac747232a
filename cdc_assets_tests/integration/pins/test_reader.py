"""Transactions that read rows, one after another in a session."""

from __future__ import annotations

from cdc_assets.pins.reader import snapshot_reader
from cdc_assets.postgres.copy_out.kinds import TEXT
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
