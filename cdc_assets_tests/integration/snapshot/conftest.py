"""A table of many chunks, ready to be pinned."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cdc_assets_tests.integration.snapshot.sources import WIDE
from cdc_assets_tests.support.lake import Lake, NewLake


@pytest.fixture
def source(new_lake: NewLake) -> Iterator[Lake]:
    with new_lake(
        WIDE,
        {"name": "t", "chunk_pages": 4},
        snapshot={"max_parallel_chunks": 2},
    ) as opened:
        yield opened


@pytest.fixture
def looked_at_each_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables that wait for the server of ``snapshot.from`` don't wait for the next look, too."""
    monkeypatch.setattr("cdc_assets.pins.elsewhere.looks._SECONDS", 0.0)
    monkeypatch.setattr("cdc_assets.pins.elsewhere.looks._REST", 0)
