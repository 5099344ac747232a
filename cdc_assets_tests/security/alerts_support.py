"""Sinks of alerts, and what is to be told."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.observe.condition import FAIL, Condition
from cdc_assets_tests.sink_support import Inbox

START = datetime(2026, 1, 1, tzinfo=UTC)


def config_of(*sinks: dict[str, Any]) -> SourceConfig:
    raw = {
        "name": "shop",
        "postgres": {"dsn": "postgresql://h/d"},
        "tables": [{"name": "t"}],
        "alerts": {"sinks": list(sinks), "min_interval": 0},
    }
    return parse_config(raw, "test")


def to_webhook(inbox: Inbox) -> dict[str, Any]:
    return {"type": "webhook", "url": f"http://127.0.0.1:{inbox.port}/x"}


def to_mail(inbox: Inbox) -> dict[str, Any]:
    at = {"host": "127.0.0.1", "port": inbox.port, "security": "none"}
    return {"type": "mail", **at, "from": "cdc@example.com", "to": ["ops@example.com"]}


def wrong(name: str) -> Condition:
    return Condition(f"parked:{name}", f"{name} is parked", name, f"resync '{name}'", FAIL)
