"""Sinks of alerts, and what is to be told."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.observe.condition import FAIL, Condition, Limits
from cdc_assets_tests.support.sinks import Inbox

START = datetime(2026, 1, 1, tzinfo=UTC)
TOKEN = "T0PSECRET"


def config_of(*sinks: dict[str, Any], **alerts: Any) -> SourceConfig:
    """A source that tells these sinks, or the log, of everything at once."""
    raw = {
        "name": "shop",
        "postgres": {"dsn": "postgresql://h/d"},
        "tables": [{"name": "t"}],
        "alerts": {"min_interval": 0, **alerts, "sinks": list(sinks) or [{"type": "log"}]},
    }
    return parse_config(raw, "test")


def to_webhook(inbox: Inbox, **settings: Any) -> dict[str, Any]:
    """Whose address holds a secret."""
    return {"type": "webhook", "url": f"http://127.0.0.1:{inbox.port}/{TOKEN}", **settings}


def to_mail(inbox: Inbox) -> dict[str, Any]:
    at = {"host": "127.0.0.1", "port": inbox.port, "security": "none"}
    return {"type": "mail", **at, "from": "cdc@example.com", "to": ["ops@example.com"]}


def condition(key: str = "flusher", limits: Limits = FAIL, **settings: Any) -> Condition:
    what = settings.pop("what", f"{key} is wrong")
    return Condition(key, what, "very", "do something", limits, **settings)


def wrong(name: str) -> Condition:
    return Condition(f"parked:{name}", f"{name} is parked", name, f"resync '{name}'", FAIL)
