"""Query mode in a configuration: what it takes, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from cdc_assets.config.source import SourceConfig, config_from_parent, parse_config
from cdc_assets.errors import ConfigurationError

TABLE: dict[str, Any] = {"name": "t", "watermark": {"column": "updated_at"}}


def parsed(table: Any = TABLE, **settings: Any) -> SourceConfig:
    data = {"name": "src", "postgres": {"dsn": "postgresql://h/d"}, "query": {}, "tables": [table]}
    return parse_config({**data, **settings}, "test")


def test_it_has_neither_slot_nor_publication() -> None:
    config = parsed()
    assert config.query is not None
    assert (config.slot, config.publication) == ("", "")
    assert config.streams
    assert not config.decodes
    assert config_from_parent(config.dump()) == config


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"slot": "s"}, "slot and publication"),
        ({"snapshot": {"mode": "snapshot_only"}}, "snapshot.mode: initial"),
        ({"snapshot": {"mode": "never"}}, "snapshot.mode: initial"),
        ({"snapshot": {"strategy": "incremental"}}, "snapshot.strategy"),
        ({"snapshot": {"pin": "lock"}}, "snapshot.pin"),
        ({"snapshot": {"from": {"kind": "replica", "dsn": "postgresql://r/d"}}}, "snapshot.from"),
        ({"marks": {"every": "1d"}}, "marks.every"),
        ({"markers": {"table": "public.markers"}}, "markers.table"),
        (
            {
                "postgres": {"dsn": "postgresql://h/d", "standby": True},
                "state": {"postgres_url": "postgresql://s/d"},
            },
            "postgres.standby",
        ),
        ({"backfills": {"signals": "public.signals"}}, "backfills.signals"),
        ({"query": {"every": "1h"}}, "freshness.warn"),
        ({"query": None}, "has a watermark, which query mode alone reads"),
        (
            {"query": None, "table": {"name": "t", "key": ["id"]}},
            "has key:, which query mode alone reads",
        ),
        (
            {"postgres": {"dsn": "postgresql://h/d", "replication_dsn": "postgresql://h/d"}},
            "postgres.replication_dsn",
        ),
    ],
)
def test_settings_that_need_a_slot_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        parsed(**settings)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"mode": "append"}, "append keeps each change"),
        ({"adopt": True}, "adopt: it needs a log"),
        ({"where": "id > 3"}, "a row that leaves the condition"),
        ({"only": True}, "takes whole tables"),
        ({"pin": "lock"}, "without a slot"),
        ({"watermark": None}, "watermark: missing"),
        ({"key": ["id", "id"]}, "names a column twice"),
        ({"watermark": {"column": "v", "lag": "4000d"}}, "lag"),
        ({"columns": {"exclude": ["updated_at"]}}, "excluded or masked"),
        ({"watermark": {"column": "v", "order": "sequence", "lag": "5m"}}, "lag_numbers"),
        ({"watermark": {"column": "v", "lag_numbers": 5}}, "order: clock has lag"),
    ],
)
def test_what_a_table_may_not_say(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        parsed(TABLE | more)
