"""What a diff says where it can't compare."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc_assets.config.source import parse_config
from cdc_assets.errors import EnvironmentProblem
from cdc_assets.marks.diff.sides import opened
from cdc_assets.marks.diff.whole import Diff
from cdc_assets.postgres.lsn import Lsn


def test_a_side_that_cannot_be_reached_is_named_with_its_own_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CDC_ASSETS_HOME", str(tmp_path))
    green = parse_config(
        {
            "name": "shop_green",
            "postgres": {"dsn": "postgresql://cdc:pLanTed@127.0.0.1:9/shop"},
            "state": {"postgres_url": "postgresql://cdc:pLanTed@127.0.0.1:1/cdc"},
            "tables": ["t"],
        },
        "green.yaml",
    )
    with pytest.raises(EnvironmentProblem) as told, opened("green", green, "m"):
        pass
    assert str(told.value).startswith("green: ")
    assert "state.postgres_url" in str(told.value)
    assert "pLanTed" not in str(told.value)


def test_nothing_compared_is_not_equal() -> None:
    assert Diff("m", Lsn(1), ()).exit_code == 1
