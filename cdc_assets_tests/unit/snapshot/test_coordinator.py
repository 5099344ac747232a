"""How often a coordinator looks at its copies."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from cdc_assets.postgres.names import TableId
from cdc_assets.snapshot import coordinator


def test_a_look_that_takes_long_is_repeated_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    stop, times = threading.Event(), list[float]()

    def looks(*_: Any) -> dict[TableId, Any]:
        times.append(time.monotonic())
        time.sleep(0.2)
        if len(times) == 3:
            stop.set()
        return {}

    # Others copy it.
    copy: Any = SimpleNamespace(
        table=TableId("public", "t"), rests=lambda *_, at_once: at_once, claimable=lambda: False
    )
    pipeline: Any = SimpleNamespace(store=None)
    session: Any = None
    monkeypatch.setattr(coordinator, "looks", looks)
    assert coordinator._Coordinator(pipeline, session, [copy], None, stop).run() == {}
    assert all(later - former > 2.0 for former, later in pairwise(times))
