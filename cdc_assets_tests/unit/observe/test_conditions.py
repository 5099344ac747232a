"""What is wrong, from facts."""

from __future__ import annotations

from datetime import timedelta

from cdc_assets.log.sessions.flusher_status import FlusherStatus
from cdc_assets.observe.conditions import conditions
from cdc_assets.observe.facts import Facts
from cdc_assets.observe.notices import Memory, observe
from cdc_assets.observe.status import SourceStatus
from cdc_assets_tests.support.alerts import START, config_of


def test_a_flusher_that_ends_again_and_again_is_told_though_it_is_starting_at_some_looks() -> None:
    config, memory, grades = config_of(), Memory(), []
    for look, state in enumerate(["starting", "down"] * 6):
        at = START + look * timedelta(seconds=30)
        status = SourceStatus("shop", (), "cdc_shop", None, FlusherStatus(state), {})
        memory = observe(memory, conditions(Facts(at, status=status), config), at)
        grades.append(memory.known["flusher"].grade if "flusher" in memory.known else None)
    assert grades == [None] * 2 + ["warn"] * 8 + ["fail"] * 2
