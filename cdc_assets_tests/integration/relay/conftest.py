"""A first log of two tables, which the second ones of the tests get."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc_assets.config.source import SourceConfig
from cdc_assets_tests.support.flusher import Bench


@pytest.fixture
def first(source: Bench, tmp_home: Path) -> SourceConfig:
    for name in ("a", "b"):
        source.execute(f"create table {name} (id int primary key, v text)")
    config = source.config("a", "b")
    source.flush(config)
    return config
