"""Promise 10: a message that isn't taken holds up no other one, and what isn't there loses none."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import pytest

from cdc_assets.config.alerts import SinkConfig
from cdc_assets.config.source import SourceConfig
from cdc_assets.observe import outbox
from cdc_assets.observe.notices import Memory, Notice, Waiting, due, observe
from cdc_assets.observe.outbox import deliver, undelivered
from cdc_assets.observe.sinks import send
from cdc_assets_tests.support.alerts import START, config_of, to_mail, to_webhook, wrong
from cdc_assets_tests.support.sinks import mailbox, webhook


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda _: None)


def _looks(config: SourceConfig, memory: Memory, times: int) -> tuple[Memory, list[str]]:
    told: list[str] = []
    for _ in range(times):
        memory, problems = deliver(config, Memory.load(memory.dump()))
        told += problems
    return memory, told


@pytest.mark.parametrize("status", [0, 302, 400, 413, 500])
def test_a_message_that_a_sink_never_takes_lets_the_others_by_and_is_left_out(status: int) -> None:
    with webhook() as inbox, webhook() as elsewhere:
        inbox.poison, inbox.status = "poison", status
        inbox.location = f"http://127.0.0.1:{elsewhere.port}/"
        config, memory = config_of(to_webhook(inbox)), Memory()
        found = []
        for number, name in enumerate(("poison", "b", "c")):
            now = START + timedelta(seconds=number)
            found.append(wrong(name))
            memory, _ = due(observe(memory, found, now), config.alerts, now)
        assert [len(w) for w in memory.outbox.values()] == [3]
        memory, told = _looks(config, memory, 10)
        # Told as long as it lasts; the other sinks say so, too.
        why = f"HTTPError {status}" if status else "RemoteDisconnected"
        assert any("poison" not in problem and why in problem for problem in told)
        assert [c.key for c in undelivered(memory)] == ["sink:0:webhook"]
        assert len(inbox.received) == 2, "the others came through"
        now = START + timedelta(minutes=1)
        for number in range(40):  # life goes on
            at = now + timedelta(seconds=number)
            found.append(wrong(f"d{number}"))
            memory, _ = due(observe(memory, found, at), config.alerts, at)
            memory, problems = deliver(config, memory)
            told += problems
        assert memory.outbox == {}
        assert any("left out" in problem for problem in told)
        assert elsewhere.attempts == 0, "a redirect isn't followed"


def _waiting(config: SourceConfig, names: str) -> Memory:
    """A message about each name, one second after the other."""
    memory = Memory()
    for number in range(len(names)):
        now, found = START + timedelta(seconds=number), list(map(wrong, names[: number + 1]))
        memory, _ = due(observe(memory, found, now), config.alerts, now)
    return memory


def test_once_a_sink_takes_a_message_the_others_come_in_their_order() -> None:
    with webhook() as inbox:
        config = config_of(to_webhook(inbox))
        memory = _waiting(config, "abcdef")
        inbox.refusals = 10**6
        memory, _ = _looks(config, memory, 10)
        inbox.refusals = 0
        memory, _ = _looks(config, memory, 1)
        came = [re.findall(r"(\w) is parked", body["text"])[0] for body in inbox.received]
    # Which one is tried first is by turns: the oldest may be the one that isn't taken.
    assert sorted(came) == list("abcdef") and came[1:] == sorted(came[1:])
    assert came[0] != "a"


@pytest.mark.parametrize("status", [402, 405, 423, 451])
def test_a_status_that_says_nothing_of_the_message_leaves_none_out(status: int) -> None:
    with webhook() as inbox:
        config = config_of(to_webhook(inbox))
        inbox.refusals, inbox.status = 10**6, status
        memory, _ = _looks(config, _waiting(config, "ab"), 50)
        assert len(memory.outbox["0:webhook"]) == 2


def test_nothing_else_is_tried_at_a_sink_that_is_not_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[str] = []

    def counted(config: SourceConfig, sink: SinkConfig, notices: Sequence[Notice]) -> None:
        sent.append(sink.type)
        send(config, sink, notices)

    with socket.socket() as bound, mailbox() as mail:
        bound.bind(("127.0.0.1", 0))  # and nobody listens
        port = bound.getsockname()[1]
        topic = {"type": "sns", "topic_arn": "arn:aws:sns:eu-central-1:1:cdc"}
        config = config_of(
            {"type": "webhook", "url": f"http://127.0.0.1:{port}/x"},
            {"type": "webhook", "url": "http://nobody.invalid/x"},
            to_mail(replace(mail, port=port)),
            to_mail(mail),
            {**topic, "endpoint": f"http://127.0.0.1:{port}"},
        )
        mail.refusals = 10**6
        memory = _waiting(config, "abc")
        for waiting in memory.outbox.values():
            waiting[:] = [replace(one, tries=100) for one in waiting]
        with monkeypatch.context() as patched:
            patched.setattr(outbox, "send", counted)
            memory, told = deliver(config, memory)
    assert sorted(sent) == ["mail", "mail", "sns", "webhook", "webhook"], told
    assert {len(waiting) for waiting in memory.outbox.values()} == {3}


def test_a_sink_that_is_away_loses_nothing_however_long() -> None:
    with webhook() as inbox:
        config = config_of(to_webhook(inbox))
        memory = _waiting(config, "abc")
        inbox.refusals = 10**6
        memory, told = _looks(config, memory, 100)
        assert all("took no message" in problem for problem in told)
        assert len(memory.outbox["0:webhook"]) == 3
        inbox.refusals = 0
        memory, _ = _looks(config, memory, 1)
        assert (memory.outbox, len(inbox.received)) == ({}, 3)


def test_what_waited_in_the_form_of_an_earlier_version_is_delivered() -> None:
    with webhook() as inbox:
        config = config_of(to_webhook(inbox))
        memory, _ = due(observe(Memory(), [wrong("a\x1b[2J")], START), config.alerts, START)
        old = json.loads(memory.dump())
        old["outbox"] = {key: [w["notices"] for w in ws] for key, ws in old["outbox"].items()}
        loaded = Memory.load(json.dumps(old))
        assert isinstance(loaded.outbox["0:webhook"][0], Waiting)
        memory, _ = deliver(config, loaded)
        assert (memory.outbox, len(inbox.received)) == ({}, 1)
