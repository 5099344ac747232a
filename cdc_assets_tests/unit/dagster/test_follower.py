"""When the sensor ends a follower."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cdc_assets.config.source import parse_config
from cdc_assets.dagster import follower
from cdc_assets.errors import FollowerProblem
from cdc_assets.process import children

CONFIG = parse_config(
    {"name": "src", "postgres": {"dsn": "postgresql://u@h/d"}, "tables": [{"name": "public.t"}]},
    "test",
)


@pytest.mark.parametrize(
    ("silent", "heard", "ends"),
    [
        (3600.0, 33.0, False),  # it had nothing to do, and its heart stood still for a moment
        (3600.0, 300.0, True),
        (3600.0, None, True),  # it is no worker, and doesn't say why
        (20.0, None, False),  # it waits, and says so; or it has just begun
        (20.0, 300.0, False),
    ],
)
def test_only_one_that_is_neither_heard_of_nor_says_why_is_ended(
    silent: float, heard: float | None, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = list[float]()

    def stop(timeout_seconds: float) -> None:
        stopped.append(timeout_seconds)

    spec = SimpleNamespace(log=Path("follower.log"))
    child: Any = SimpleNamespace(pid=7, silent_seconds=silent, spec=spec, stop=stop)
    monkeypatch.setattr(children, "child_of", lambda _: child)
    if ends:
        with pytest.raises(FollowerProblem, match=r"the follower of src \(pid 7\) hung"):
            follower._end_if_hung(CONFIG, heard)
    else:
        follower._end_if_hung(CONFIG, heard)
    assert bool(stopped) is ends
