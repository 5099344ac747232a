"""What services for chats, and for who is on call, are told: by their documentation."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from cdc_assets.errors import ConfigurationError
from cdc_assets.observe.condition import FAIL, WARN, Condition
from cdc_assets.observe.message import Post
from cdc_assets.observe.notices import Memory, due, observe
from cdc_assets.observe.outbox import deliver
from cdc_assets.observe.sinks import try_sinks
from cdc_assets_tests.support.alerts import START, TOKEN, condition, config_of, to_webhook
from cdc_assets_tests.support.sinks import Inbox, webhook

KEY = "a-key-of-the-service"


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda _: None)


def told(inbox: Inbox, **settings: Any) -> Inbox:
    """A warning and another one, the first becomes worse, then both are over."""
    config, memory = config_of(to_webhook(inbox, **settings)), Memory()
    looks: list[list[Condition]] = [
        [condition("a", WARN), condition("b/<c>", WARN)],
        [condition("a")],
        [],
    ]
    for step, found in enumerate(looks):
        now = START + timedelta(seconds=step)
        memory, _ = due(observe(memory, found, now), config.alerts, now)
        memory, problems = deliver(config, memory)
        assert problems == []
    return inbox


def test_pagerduty_has_an_incident_a_problem_that_is_resolved() -> None:
    with webhook() as inbox:
        events = told(inbox, format="pagerduty", key=KEY).received
    assert {event["routing_key"] for event in events} == {KEY}
    story = [(e["event_action"], e["dedup_key"].removeprefix("cdc_assets/shop/")) for e in events]
    assert sorted(story[:2]) == [("trigger", "a"), ("trigger", "b/<c>")]
    assert sorted(story[2:4]) == [("resolve", "b/<c>"), ("trigger", "a")]
    assert story[4:] == [("resolve", "a")]
    [worse] = [e for e in events[2:4] if e["event_action"] == "trigger"]
    assert worse["payload"]["severity"] == "critical"
    assert worse["payload"]["summary"] == "[cdc shop] FAIL (was WARN): a is wrong"
    assert worse["payload"]["custom_details"]["do"] == "do something"
    assert {"summary", "source", "severity"} <= worse["payload"].keys()


def test_opsgenie_has_an_alert_a_problem_that_is_closed() -> None:
    with webhook() as inbox:
        told(inbox, format="opsgenie", key=KEY)
    assert {authorization for _, authorization in inbox.requests} == {f"GenieKey {KEY}"}
    paths = [path.removeprefix(f"/{TOKEN}") for path, _ in inbox.requests]
    assert sorted(paths) == [
        "",
        "",
        "",
        "/cdc_assets%2Fshop%2Fa/close?identifierType=alias",
        "/cdc_assets%2Fshop%2Fa/priority?identifierType=alias",
        "/cdc_assets%2Fshop%2Fb%2F%3Cc%3E/close?identifierType=alias",
    ]
    assert {"priority": "P1"} in inbox.received, "an open alert keeps the one that it was made with"
    opened = [body for body in inbox.received if "alias" in body]
    assert {body["priority"] for body in opened} == {"P1", "P3"}
    assert {body["alias"] for body in opened} == {"cdc_assets/shop/a", "cdc_assets/shop/b/<c>"}
    assert "do: do something" in opened[0]["description"]


def test_teams_gets_a_card_in_which_nothing_is_markup() -> None:
    with webhook() as inbox:
        told(inbox, format="teams")
    first, _, last = inbox.received
    [attachment] = first["attachments"]
    assert attachment["contentType"] == "application/vnd.microsoft.card.adaptive"
    card = attachment["content"]
    texts = [block["text"] for block in card["body"]]
    assert (card["type"], texts[0]) == (
        "AdaptiveCard",
        r"\[cdc shop\] WARN: a is wrong (and 1 more)",
    )
    assert r"WARN: b/\<c\> is wrong" in texts
    assert {block["type"] for block in card["body"]} == {"TextBlock"}
    colours = [b["color"] for b in last["attachments"][0]["content"]["body"] if "color" in b]
    assert colours == ["Good"]


@pytest.mark.parametrize("format_", ["teams", "pagerduty", "opsgenie", "slack"])
def test_whatever_is_told_has_a_size_that_the_services_take(format_: str) -> None:
    key = {"key": KEY} if format_ in ("pagerduty", "opsgenie") else {}
    with webhook() as inbox:
        config = config_of(to_webhook(inbox, format=format_, **key))
        found = [
            condition("é" * 300 + str(i), what="\u2028*" * 3000, limits=WARN) for i in range(100)
        ] + [condition(f"{i}", what="\U0001f980ж" * 1500, limits=FAIL) for i in range(100)]
        memory, _ = due(observe(Memory(), found, START), config.alerts, START)
        _, problems = deliver(config, memory)
    assert problems == []
    limit = {"teams": 28_000, "pagerduty": 512_000, "opsgenie": 100_000, "slack": 200_000}[format_]
    assert max(inbox.sizes) < limit
    for body in inbox.received:
        assert len(body.get("dedup_key", "")) <= 255
        assert len(body.get("alias", "")) <= 512
        assert len(body.get("message", "")) <= 130


def test_a_key_is_in_no_text() -> None:
    config = config_of({"type": "webhook", "format": "pagerduty", "key": KEY})
    assert KEY not in repr(config)
    assert KEY not in repr(Post("https://h", {"routing_key": KEY}, {"Authorization": KEY}))


@pytest.mark.parametrize("format_", ["pagerduty", "opsgenie"])
def test_a_test_leaves_no_incident_open(format_: str) -> None:
    with webhook() as inbox:
        told = try_sinks(config_of(to_webhook(inbox, format=format_, key=KEY)))
    assert [*told.values()] == [None]
    last = inbox.received[-1], inbox.requests[-1][0]
    assert last[0].get("event_action") == "resolve" or "/close?" in last[1]


@pytest.mark.parametrize(
    ("sink", "said"),
    [
        ({"format": "pagerduty"}, "format pagerduty needs one"),
        ({"format": "teams", "url": "https://h", "key": KEY}, "format teams has none"),
        ({"format": "slack"}, "url: missing"),
        ({"format": "pagerduty", "key": f"{KEY}\n"}, "an end of line"),
        ({"format": "irc", "url": "https://h"}, "slack"),
    ],
)
def test_what_a_sink_lacks_is_named(sink: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as refused:
        config_of({"type": "webhook", **sink})
    assert KEY not in str(refused.value)
