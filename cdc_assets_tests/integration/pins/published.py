"""A source's publications, and what an application does to published tables."""

from __future__ import annotations

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.postgres.publication.contents import published_tables
from cdc_assets_tests.support.flusher import Bench


def configured(source: Bench, *names: str) -> SourceConfig:
    extra: dict[str, dict[str, object]] = {
        "events": {"mode": "append"},
        "own": {"only": True},
        "hidden": {"columns": {"exclude": ["id"]}},
    }
    tables = [{"name": name, **extra.get(name, {})} for name in names]
    return parse_config({**source.settings(), "tables": tables}, "test")


def published(source: Bench, suffix: str = "") -> set[str]:
    found = published_tables(source.connection, f"cdc_{source.name}{suffix}")
    assert found is not None
    return {table.name for table in found}


def write(source: Bench, *names: str) -> None:
    """What an application does: none of it may fail."""
    for name in names:
        source.execute(f"insert into {name} values (1, 1)")
        source.execute(f"update {name} set v = 2")
        source.execute(f"delete from {name}")


def states(source: Bench) -> dict[str, str]:
    return dict(source.ask_log("select table_name, state from _pg2iceberg.tables"))
