"""The JSON schema says of a configuration what the configuration itself says."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import cdc_assets
from cdc_assets.components import PostgresSource
from cdc_assets.config.base import spelt
from cdc_assets.config.schema import COMPONENT, attributes_schema, file_schema
from cdc_assets.config.source import parse_config

PACKAGE = Path(cdc_assets.__file__).parent
LEAST = {"name": "a", "postgres": {"embedded": True}, "tables": ["public.t"]}


def problems(data: Any, schema: Any = None) -> list[str]:
    checker = jsonschema.Draft202012Validator(schema or file_schema())
    return [error.message for error in checker.iter_errors(data)]


@pytest.mark.parametrize("path", sorted(PACKAGE.parent.glob("**/defs/*/defs.yaml")), ids=str)
def test_the_shipped_sources_are_as_it_says(path: Path) -> None:
    data = yaml.safe_load(path.read_text())
    if data["type"].endswith("PostgresSource"):
        assert problems(data) == []
        assert (
            problems(data["attributes"], PostgresSource.get_model_cls().model_json_schema()) == []
        )


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"tables": [{"name": "t", "freshness": {"target": "500ms", "warn": 90, "fail": "1.5h"}}]},
        {"tables": ["${TABLE}"], "spark": {"cores": "${CORES}", "memory": "{{ env.MEMORY }}"}},
        {"staging": {"flush_bytes": "16MiB"}, "verify": {"every": None}},
        {"tables": [{"name": "t", "columns": {"unrepresentable": None}}]},
        {"alerts": {"sinks": [{"type": "mail", "host": "h", "from": "a@b.c", "to": ["d@e.f"]}]}},
        {"state": {"schema": "mine"}},
    ],
)
def test_what_may_be_written_passes(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems({**LEAST, **more}) == []
    for name, value in (("TABLE", "t"), ("CORES", "3")):
        monkeypatch.setenv(name, value)
    if "{{" not in str(more):
        parse_config({**LEAST, **more}, "test")


@pytest.mark.parametrize(
    "more",
    [
        {"tabels": []},
        {"tables": []},
        {"tables": [{"nmae": "t"}]},
        {"tables": [{"name": "t", "mode": "mirrored"}]},
        {"spark": {"cores": 0}},
        {"spark": {"cores": "many"}},
        {"staging": {"flush_interval": "soon"}},
        {"alerts": {"sinks": [{"type": "pigeon"}]}},
    ],
)
def test_what_may_not_be_written_does_not(more: dict[str, Any]) -> None:
    assert problems({**LEAST, **more}) != []
    assert problems({"type": COMPONENT, "attributes": {**LEAST, **more}}) != []


def test_a_wrong_key_of_a_table_is_named() -> None:
    more = {"tables": ["t", {"name": "u", "freshnes": {"target": "5s"}}]}
    assert [said for said in problems({**LEAST, **more}) if "'freshnes' was unexpected" in said]


def test_defaults_are_as_the_yaml_spells_them() -> None:
    freshness = attributes_schema()["$defs"]["FreshnessConfig"]["properties"]
    assert [freshness[key]["default"] for key in ("target", "warn", "fail")] == ["5s", "5m", "15m"]
    assert "visible at about this age" in freshness["target"]["description"]
    shown = [spelt(timedelta(seconds=s)) for s in (0, 0.5, 90, 120, 7200, 86400, 604800)]
    assert shown == ["0s", "0.5s", "90s", "2m", "2h", "1d", "7d"]
