"""Which ratios of ``make bench-regress`` are told as slower."""

from __future__ import annotations

import pytest

from cdc_assets_tests.benchmarks.regress import BENCHMARKS, Ratio, slower

COST = Ratio("cost", ("cost",))
SPEED = Ratio("speed", ("by", 1, "speed"), more_is_better=True)


@pytest.mark.parametrize(
    ("found", "worse"),
    [
        ({"cost": 1.2, "speed": 0.8}, []),
        ({"cost": 1.4, "speed": 0.7}, ["cost", "speed"]),
        ({"cost": 0.1, "speed": 9.0}, []),
        ({}, []),
    ],
)
def test_what_got_worse_by_more_than_the_limit_is_named(
    found: dict[str, float], worse: list[str]
) -> None:
    assert slower([COST, SPEED], found, {"cost": 1.0, "speed": 1.0}, 0.3) == worse
    assert slower([COST, SPEED], found, {}, 0.3) == []


def test_a_figure_that_was_not_taken_is_none() -> None:
    assert SPEED.read({"by": [{}, {"speed": 2}]}) == 2.0
    assert SPEED.read({"by": [{}, {"speed": None}]}) is None
    assert SPEED.read({"by": None}) is None


def test_names_are_unique() -> None:
    names = [ratio.name for benchmark in BENCHMARKS for ratio in benchmark.ratios]
    assert len(set(names)) == len(names)
