"""A source whose log is read by groups."""

from __future__ import annotations

import json

import pytest

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.consumers import stream
from cdc_assets_tests.support.flusher import Bench
from cdc_assets_tests.support.groups import TABLES


@pytest.fixture
def config(source: Bench, monkeypatch: pytest.MonkeyPatch) -> SourceConfig:
    """Four tables that stream, and two groups that begin now."""
    monkeypatch.setattr(stream, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(stream, "SHARE_SECONDS", 0.2)
    for name in TABLES:
        source.execute(f"create table {name} (id int primary key, v text)")
    groups = [{"name": "search", "start": "now"}, {"name": "other", "start": "now"}]
    settings = {**source.settings(*TABLES), "consumers": groups}
    (source.folder / "source.json").write_text(json.dumps(settings))
    made = parse_config(settings, "test")
    source.flush(made)
    return made
