"""What a second lake may be told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cdc_assets.config.source import SourceConfig, config_from_parent, parse_config
from cdc_assets.errors import ConfigurationError
from cdc_assets.log.staged.places import staged_places


def parsed(**settings: Any) -> SourceConfig:
    given = {
        "name": "eu",
        "postgres": {"dsn": "postgresql://host/db"},
        "log": {"of": "app", "group": "lake_eu"},
        "tables": ["public.t"],
        **settings,
    }
    return parse_config(given, "test")


def test_it_has_the_first_one_s_publication_and_places() -> None:
    config = parsed()
    assert (config.publishes, config.decodes) == (True, False)
    assert config.publication == "cdc_app"
    (place,) = staged_places(config)
    assert place.uri.endswith("/app/staging/app")
    assert place.lent
    assert place.delete([f"{place.root}/x"]) == (0, 0)
    assert parsed(publication="theirs").publication == "theirs"


def test_it_is_handed_down_to_a_child() -> None:
    assert config_from_parent(parsed().dump()) == parsed()
    assert json.loads(parsed().dump())["log"] == {"of": "app", "group": "lake_eu"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"name": "app"}, "log.of: it is the source itself"),
        ({"query": {}}, "query: with log"),
        ({"postgres": {"embedded": True}}, "postgres.embedded: with log"),
        (
            {"snapshot": {"from": {"kind": "replica", "dsn": "postgresql://b/db"}}},
            "snapshot.from: with log",
        ),
        ({"slot": "mine"}, "slot: with log"),
        ({"snapshot": {"mode": "never"}}, "snapshot.mode: with log"),
        ({"snapshot": {"mode": "snapshot_only"}}, "snapshot.mode: with log"),
        ({"markers": {"table": "public.m"}}, "markers.table: with log"),
        ({"backfills": {"signals": "public.s"}}, "backfills.signals: with log"),
        ({"consumers": [{"name": "search"}]}, "consumers: with log"),
        ({"log": {"of": "app", "group": "No"}}, "log.group"),
        ({"log": {"of": "app", "group": "lake"}}, "lake is the group of the source's own lake"),
    ],
)
def test_what_belongs_to_the_first_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        parsed(**settings)
    assert said in str(raised.value)
