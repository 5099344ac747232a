"""Conditions and their transitions: pure functions."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cdc_assets.config.alerts import AlertsConfig
from cdc_assets.observe.condition import FAIL, WARN, Condition, Limits
from cdc_assets.observe.notices import OUTBOX, Memory, Notice, due, observe
from cdc_assets_tests.support.alerts import START, condition, config_of

AGED = Limits(60.0, 300.0)


class Watch:
    """A memory that goes through JSON at each look, as the sensor's cursor does."""

    def __init__(self, **settings: Any) -> None:
        self.config = AlertsConfig.model_validate({"min_interval": 0, "remind": None, **settings})
        self.memory = Memory()

    def look(self, seconds: float, *found: Condition) -> list[tuple[str, str]]:
        return [(notice.key, notice.kind) for notice in self.notices(seconds, *found)]

    def notices(self, seconds: float, *found: Condition) -> list[Notice]:
        now = START + timedelta(seconds=seconds)
        memory, notices = due(observe(self.memory, found, now), self.config, now)
        self.memory = Memory.load(memory.dump())
        return notices


def test_each_transition_is_told_once() -> None:
    watch, wrong = Watch(), condition(limits=AGED)
    assert watch.look(0, wrong) == []
    assert watch.look(59, wrong) == []
    assert watch.look(60, wrong) == [("flusher", "problem")]
    assert watch.look(61, wrong) == []
    assert watch.look(300, wrong) == [("flusher", "worse")]
    assert watch.look(900, wrong) == []
    [back] = watch.notices(901)
    assert (back.kind, back.severity, back.before, back.lasted_seconds) == (
        "recovered",
        None,
        "fail",
        901,
    )
    assert watch.look(902) == []
    assert watch.memory.known == {}
    assert watch.look(1000, wrong) == [], "a new occurrence has an age of its own"
    assert watch.look(1060, wrong) == [("flusher", "problem")]


def test_a_recovery_is_of_what_was_told() -> None:
    """A flusher that is started again may lack its stream for a second, which nobody heard of."""
    watch = Watch()
    [told] = watch.notices(0, condition(what="no flusher is active"))
    assert watch.notices(1, condition(what="the flusher can't get its stream back")) == []
    [back] = watch.notices(2)
    assert (told.what, back.what) == ("no flusher is active", "no flusher is active")


def test_what_lasts_too_short_is_never_told() -> None:
    watch, wrong = Watch(), condition(limits=AGED)
    assert watch.look(0, wrong) == watch.look(30) == watch.look(50, wrong) == []
    assert watch.look(100, wrong) == []


def test_a_condition_that_knows_its_age_and_ends_below_its_limits_has_recovered() -> None:
    watch = Watch()
    old = condition(limits=AGED, since=START - timedelta(seconds=400))
    assert watch.look(0, old) == [("flusher", "problem")]
    fresh = condition(limits=AGED, since=START)
    [back] = watch.notices(1, fresh)
    assert (back.kind, back.lasted_seconds) == ("recovered", 401)
    assert watch.memory.known == {}


def test_the_worst_of_one_key_counts() -> None:
    watch = Watch()
    [told] = watch.notices(0, condition(limits=WARN), condition(), condition(limits=WARN))
    assert told.severity == "fail"
    assert watch.look(1, condition(limits=WARN)) == [("flusher", "better")]


def test_the_rate_limit_delays_but_loses_nothing() -> None:
    watch = Watch(min_interval=60)
    assert watch.look(0, condition("a")) == [("a", "problem")]
    assert watch.look(10, condition("a"), condition("b")) == []  # b comes
    assert watch.look(20, condition("a", WARN)) == []  # and goes
    assert watch.look(60, condition("a", WARN)) == [("a", "better"), ("b", "recovered")]
    assert watch.look(70) == []
    assert watch.look(80, condition("a", WARN)) == []
    assert watch.look(130, condition("a", WARN)) == [], "it is as it was told"


def test_what_was_worse_between_two_messages_is_told() -> None:
    watch = Watch(min_interval=60)
    assert watch.look(0, condition(limits=WARN)) == [("flusher", "problem")]
    assert watch.look(20, condition()) == watch.look(40, condition(limits=WARN)) == []
    [told] = watch.notices(60, condition(limits=WARN))
    assert (told.kind, told.severity, told.before) == ("better", "warn", "fail")


def test_what_comes_back_between_two_messages_begins_anew() -> None:
    watch, wrong = Watch(min_interval=60), condition(limits=AGED)
    assert watch.look(0, wrong) == []
    assert watch.look(60, wrong) == [("flusher", "problem")]
    assert watch.look(70) == watch.look(80, wrong) == []
    assert watch.look(120, wrong) == [("flusher", "recovered")]
    assert watch.look(139, wrong) == []
    assert watch.look(180, wrong) == [("flusher", "problem")]


def test_what_lasts_is_told_again() -> None:
    watch = Watch(remind="1h")
    assert watch.look(0, condition()) == [("flusher", "problem")]
    assert watch.look(3599, condition()) == []
    assert watch.look(3600, condition()) == [("flusher", "reminder")]
    assert watch.look(3700, condition()) == []


@given(
    st.lists(
        st.tuples(
            st.integers(0, 100),
            st.dictionaries(st.sampled_from("abc"), st.sampled_from([FAIL, WARN])),
        ),
        max_size=30,
    ),
    st.sampled_from([0, 30, 90]),
)
def test_the_last_word_is_always_true(
    steps: list[tuple[int, dict[str, Limits]]], interval: int
) -> None:
    """Whoever reads all messages knows in the end how everything is."""
    watch, told, seconds = Watch(min_interval=interval), dict[str, str | None](), 0
    wrong: dict[str, Limits] = {}
    for wait, wrong in [*steps, (0, {}), (0, steps[-1][1] if steps else {}), (100, {}), (100, {})]:
        seconds += wait
        found = [condition(key, limits) for key, limits in wrong.items()]
        for notice in watch.notices(seconds, *found):
            assert (
                notice.kind == "recovered"
                or told.get(notice.key) != notice.severity
                or (notice.before != notice.severity)
            )
            told[notice.key] = notice.severity
    assert not any(told.values())
    assert watch.memory.known == {}


def test_who_is_told_of_failures_alone_is_told_that_one_is_over() -> None:
    """A lag that goes away is a warning again before it is over."""
    log = {"type": "log", "min_severity": "fail"}
    watch, worse = Watch(sinks=[log]), condition(limits=FAIL)
    watch.notices(0, condition(limits=WARN))
    watch.notices(1, worse)
    watch.notices(2, condition(limits=WARN))
    watch.notices(3)
    said = [one["kind"] for waiting in watch.memory.outbox["0:log"] for one in waiting.notices]
    assert said == ["worse", "better", "recovered"]


def test_who_has_incidents_is_told_of_each_by_itself_and_of_the_latest_alone() -> None:
    watch = Watch(sinks=[{"type": "webhook", "format": "pagerduty", "key": "k"}])
    watch.notices(0, condition("a", WARN), condition("b", WARN))
    watch.notices(1, condition("a", FAIL))
    waiting = [one.notices for one in watch.memory.outbox["0:webhook"]]
    assert all(len(notices) == 1 for notices in waiting)
    assert [(n["key"], n["kind"]) for [n] in waiting] == [("a", "worse"), ("b", "recovered")]


def test_a_sink_that_is_down_for_long_gets_the_newest() -> None:
    config = config_of()
    memory, now = Memory(), START
    for step in range(OUTBOX + 10):
        now = START + timedelta(seconds=step)
        memory, _ = due(observe(memory, [condition(f"k{step}")], now), config.alerts, now)
    assert len(memory.outbox["0:log"]) == OUTBOX
    assert memory.outbox["0:log"][-1].notices[0]["key"] == f"k{OUTBOX + 9}"
