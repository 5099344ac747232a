"""What assets are called, and how they are grouped: by the configuration, and told apart."""

from __future__ import annotations

from typing import Any

import dagster as dg
import pytest

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.dagster.build import build_defs
from cdc_assets.dagster.names import all_tables, health_key
from cdc_assets.errors import ConfigurationError


def config_of(*tables: Any, **more: Any) -> SourceConfig:
    data = {"name": "s", "postgres": {"dsn": "postgresql://u@h/d"}, "tables": tables, **more}
    return parse_config(data, "test")


def specs(config: SourceConfig) -> dict[str, dg.AssetSpec]:
    found = build_defs(config).resolve_all_asset_specs()
    return {spec.key.to_user_string(): spec for spec in found}


def test_a_prefix_is_before_every_key() -> None:
    config = config_of("t", assets={"key_prefix": ["prod", "pg"]})
    found = specs(config)
    assert {key.split("/")[:2] == ["prod", "pg"] for key in found} == {True}
    assert set(found) >= {"prod/pg/s/t", "prod/pg/postgres/s/public/t", "prod/pg/health/s"}
    assert found["prod/pg/s/t"].deps


def test_assets_of_one_table_are_in_groups_of_their_kinds() -> None:
    """Within a group, a list shows what is last in a key: each table once."""
    assets = {"group": "raw", "tags": {"tier": "gold"}}
    other = {"name": "u", "group": "other", "tags": {"tier": "", "x/y": "z"}}
    found = specs(config_of("t", other, assets=assets))
    groups = {key: spec.group_name for key, spec in found.items() if key.endswith(("/t", "/s"))}
    assert groups == {
        "s/t": "raw",
        "health/s": "raw",
        "marks/s": "raw",
        "postgres/s/public/t": "raw_postgres",
        "snapshot/s/public/t": "raw_snapshot",
        "staged_log/s/public/t": "raw_staged_log",
        "maintenance/s/public/t": "raw_maintenance",
    }
    assert found["s/u"].group_name == "other"
    assert found["maintenance/s/public/u"].group_name == "other_maintenance"
    assert found["s/t"].tags.items() >= {"tier": "gold"}.items()
    assert found["s/u"].tags.items() >= {"tier": "", "x/y": "z"}.items()


def test_each_asset_leads_to_the_report_on_its_source() -> None:
    config = config_of("t")
    for names in all_tables(config):
        for key in names.keys:
            said = specs(config)[key.to_user_string()].metadata["health"]
            assert said == dg.MetadataValue.asset(health_key(config))


def test_a_table_of_another_namespace_has_its_key() -> None:
    tables = "a.t", {"name": "b.t", "namespace": "mart"}, {"name": "c.t", "as": "t"}
    config = config_of(*tables, lake={"prefix": "eu_"})
    keys = [names.lake.to_user_string() for names in all_tables(config)]
    assert keys == ["s/eu_a_t", "mart/eu_b_t", "s/t"]
    assert [names.lake_table_name for names in all_tables(config)][1] == "mart.eu_b_t"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"assets": {"key_prefix": ["a/b"]}}, "letters, digits and underscores"),
        ({"assets": {"group": "a b"}}, "letters, digits and underscores"),
        ({"assets": {"key_prefix": "prod"}}, r"write a list: \[prod\]"),
        (
            {
                "tables": [
                    {"name": "a.b", "namespace": "a", "as": "b__c"},
                    {"name": "a.c", "namespace": "a__b", "as": "c"},
                ]
            },
            "would be one in Dagster",
        ),
        ({"assets": {"tags": {"a b": "c"}}}, "Dagster takes up to 63"),
        ({"assets": {"tags": {"a": "b c"}}}, "Dagster takes up to 63"),
        ({"assets": {"tags": {"dagster/kind/x": ""}}}, "Dagster takes|aren't yours"),
        ({"assets": {"tags": {"cdc_assets/part": ""}}}, "aren't yours to set"),
        ({"lake": {"prefix": "Eu-"}}, "pattern"),
        ({"tables": [{"name": "t", "namespace": "A"}]}, "plain lower-case word"),
        (
            {"tables": ["t", {"name": "u", "as": "T", "namespace": "s"}]},
            "would both become the lake table",
        ),
    ],
)
def test_what_dagster_or_the_lake_would_refuse_is_refused_by_name(
    more: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        config_of(*more.pop("tables", ["t"]), **more)
