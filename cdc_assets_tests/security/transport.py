"""A source's configuration by its DSN, without the environment's PG… variables."""

from __future__ import annotations

import os

import pytest

from cdc_assets.config.source import SourceConfig, parse_config


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PG")]:
        monkeypatch.delenv(name)


def source(dsn: str, **more: object) -> SourceConfig:
    given = {"name": "src", "postgres": {"dsn": dsn}, "tables": [{"name": "t"}]}
    return parse_config({**given, **more}, "test")
