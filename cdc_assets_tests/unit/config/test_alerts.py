"""Mistakes in the section ``alerts``."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from cdc_assets.config.source import parse_config
from cdc_assets.errors import ConfigurationError
from cdc_assets_tests.support.alerts import TOKEN, config_of


@pytest.mark.parametrize(
    ("alerts", "culprit"),
    [
        ({"sinks": [{"type": "pager"}]}, "alerts.sinks[entry 1]"),
        ({"sinks": [{"type": "webhook", "url": "${NOT_SET_ANYWHERE}"}]}, "NOT_SET_ANYWHERE"),
        ({"sinks": [{"type": "webhook", "url": "ftp://x"}]}, "https://"),
        (
            {
                "sinks": [
                    {
                        "type": "mail",
                        "host": "h",
                        "security": "none",
                        "username": "u",
                        "password": TOKEN,
                        "from": "a@b",
                        "to": ["c@d"],
                    }
                ]
            },
            "starttls or tls",
        ),
        ({"health": {"warn": "5m", "fail": "1m"}}, "warn has to be at most fail"),
        ({"slot": {"retained_warn": "30GB"}}, "at most"),
    ],
)
def test_a_mistake_in_the_section_is_named_and_no_secret(
    alerts: dict[str, Any], culprit: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(culprit)) as raised:
        parse_config({**json.loads(config_of().dump()), "alerts": alerts}, "test")
    assert TOKEN not in str(raised.value)
