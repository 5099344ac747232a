"""The shipped code location, whose demo source has another configuration where the test wants it.

A module, because `dagster dev` loads it: see ``dev_server``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from cdc_assets.components import postgres_source
from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets_tests.e2e.dev_server import CHANGES_VARIABLE


def _changed(data: object, origin: str, **more: Any) -> SourceConfig:
    assert isinstance(data, Mapping)
    changes: dict[str, Any] = json.loads(os.environ[CHANGES_VARIABLE])
    freshness = changes.pop("freshness", {})
    others = freshness.get("others", {})
    tables = [
        {
            **table,
            "freshness": {**table.get("freshness", {}), **freshness.get(table["name"], others)},
        }
        for table in data["tables"]
    ]
    return parse_config({**data, **changes, "tables": tables}, origin, **more)


vars(postgres_source)["parse_config"] = _changed

from cdc_assets.definitions import defs  # noqa: E402 -- only now may it be loaded

__all__ = ["defs"]
