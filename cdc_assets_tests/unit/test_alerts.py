"""Conditions, their transitions and messages: pure functions; and real servers as sinks."""

from __future__ import annotations

import email
import email.policy
import json
import socket
import ssl
import subprocess
import threading
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from moto.server import ThreadedMotoServer

from cdc_assets.cli.main import cli
from cdc_assets.config.alerts import AlertsConfig
from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.errors import ConfigurationError
from cdc_assets.observe import sinks
from cdc_assets.observe.condition import FAIL, WARN, Condition, Limits
from cdc_assets.observe.notices import OUTBOX, Memory, Notice, due, observe
from cdc_assets.observe.outbox import deliver
from cdc_assets_tests.sink_support import Inbox, mailbox, webhook

START = datetime(2026, 1, 1, tzinfo=UTC)
AGED = Limits(60.0, 300.0)
TOKEN = "T0PSECRET"


def _config(*sinks_: dict[str, Any], **alerts: Any) -> SourceConfig:
    return parse_config(
        {
            "name": "shop",
            "postgres": {"dsn": "postgresql://nobody@localhost/none"},
            "tables": [{"name": "public.orders"}],
            "alerts": alerts | {"sinks": list(sinks_) or [{"type": "log"}]},
        },
        "test",
    )


def _condition(key: str = "flusher", limits: Limits = FAIL, **settings: Any) -> Condition:
    what = settings.pop("what", f"{key} is wrong")
    return Condition(key, what, "very", "do something", limits, **settings)


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
    watch, wrong = Watch(), _condition(limits=AGED)
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
    [told] = watch.notices(0, _condition(what="no flusher is active"))
    assert watch.notices(1, _condition(what="the flusher can't get its stream back")) == []
    [back] = watch.notices(2)
    assert (told.what, back.what) == ("no flusher is active", "no flusher is active")


def test_what_lasts_too_short_is_never_told() -> None:
    watch, wrong = Watch(), _condition(limits=AGED)
    assert watch.look(0, wrong) == watch.look(30) == watch.look(50, wrong) == []
    assert watch.look(100, wrong) == []


def test_a_condition_that_knows_its_age_and_ends_below_its_limits_has_recovered() -> None:
    watch = Watch()
    old = _condition(limits=AGED, since=START - timedelta(seconds=400))
    assert watch.look(0, old) == [("flusher", "problem")]
    fresh = _condition(limits=AGED, since=START)
    [back] = watch.notices(1, fresh)
    assert (back.kind, back.lasted_seconds) == ("recovered", 401)
    assert watch.memory.known == {}


def test_the_worst_of_one_key_counts() -> None:
    watch = Watch()
    [told] = watch.notices(0, _condition(limits=WARN), _condition(), _condition(limits=WARN))
    assert told.severity == "fail"
    assert watch.look(1, _condition(limits=WARN)) == [("flusher", "better")]


def test_the_rate_limit_delays_but_loses_nothing() -> None:
    watch = Watch(min_interval=60)
    assert watch.look(0, _condition("a")) == [("a", "problem")]
    assert watch.look(10, _condition("a"), _condition("b")) == []  # b comes
    assert watch.look(20, _condition("a", WARN)) == []  # and goes
    assert watch.look(60, _condition("a", WARN)) == [("a", "better"), ("b", "recovered")]
    assert watch.look(70) == []
    assert watch.look(80, _condition("a", WARN)) == []
    assert watch.look(130, _condition("a", WARN)) == [], "it is as it was told"


def test_what_was_worse_between_two_messages_is_told() -> None:
    watch = Watch(min_interval=60)
    assert watch.look(0, _condition(limits=WARN)) == [("flusher", "problem")]
    assert watch.look(20, _condition()) == watch.look(40, _condition(limits=WARN)) == []
    [told] = watch.notices(60, _condition(limits=WARN))
    assert (told.kind, told.severity, told.before) == ("better", "warn", "fail")


def test_what_comes_back_between_two_messages_begins_anew() -> None:
    watch, wrong = Watch(min_interval=60), _condition(limits=AGED)
    assert watch.look(0, wrong) == []
    assert watch.look(60, wrong) == [("flusher", "problem")]
    assert watch.look(70) == watch.look(80, wrong) == []
    assert watch.look(120, wrong) == [("flusher", "recovered")]
    assert watch.look(139, wrong) == []
    assert watch.look(180, wrong) == [("flusher", "problem")]


def test_what_lasts_is_told_again() -> None:
    watch = Watch(remind="1h")
    assert watch.look(0, _condition()) == [("flusher", "problem")]
    assert watch.look(3599, _condition()) == []
    assert watch.look(3600, _condition()) == [("flusher", "reminder")]
    assert watch.look(3700, _condition()) == []


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
        found = [_condition(key, limits) for key, limits in wrong.items()]
        for notice in watch.notices(seconds, *found):
            assert (
                notice.kind == "recovered"
                or told.get(notice.key) != notice.severity
                or (notice.before != notice.severity)
            )
            told[notice.key] = notice.severity
    assert not any(told.values())
    assert watch.memory.known == {}


def _send(config: SourceConfig, *found: Condition) -> tuple[Memory, list[str]]:
    memory, _ = due(observe(Memory(), found, START), config.alerts, START)
    return deliver(config, memory)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda _: None)


def _webhook(inbox: Inbox, **settings: Any) -> dict[str, Any]:
    return {"type": "webhook", "url": f"http://127.0.0.1:{inbox.port}/{TOKEN}", **settings}


def test_a_webhook_gets_what_slack_takes_and_is_tried_again() -> None:
    with webhook() as inbox:
        inbox.refusals = 2
        memory, problems = _send(
            _config(_webhook(inbox)), _condition("b", WARN), _condition("<a> & co")
        )
    assert (problems, memory.outbox, inbox.attempts) == ([], {}, 3)
    [body] = inbox.received
    assert body["text"] == "[cdc shop] FAIL: &lt;a&gt; &amp; co is wrong (and 1 more)"
    first, second = body["attachments"]
    assert first["title"] == "FAIL: &lt;a&gt; &amp; co is wrong"
    assert first["text"] == "since 2026-01-01 00:00:00 UTC, 0 s: very\ndo: do something"
    assert (second["title"], second["color"]) == ("WARN: b is wrong", "#e6a117")


def test_what_a_sink_does_not_take_waits_for_it_and_its_address_is_in_no_message() -> None:
    with webhook() as inbox:
        inbox.refusals = 3
        config = _config(_webhook(inbox), {"type": "log"})
        memory, [problem] = _send(config, _condition())
        assert problem == "0:webhook took no message: HTTPError 503; 1 wait"
        assert list(memory.outbox) == ["0:webhook"], "the log has taken it"
        assert TOKEN not in memory.dump()
        again, problems = deliver(config, Memory.load(memory.dump()))
        assert (again.outbox, problems, len(inbox.received)) == ({}, [], 1)
    _, [gone] = _send(config, _condition())
    assert gone == "0:webhook took no message: ConnectionRefusedError; 1 wait"


def test_a_test_message_says_whether_it_was_taken(tmp_path: Path) -> None:
    with webhook() as inbox:
        config = _config(_webhook(inbox), _webhook(Inbox(port=1)))
        file = tmp_path / "shop.json"
        file.write_text(config.dump())
        done = CliRunner().invoke(cli, ["--config", str(file), "alert-test"])
    assert (done.exit_code, done.output.splitlines()) == (
        1,
        ["0:webhook: sent", "1:webhook: ConnectionRefusedError"],
    )
    assert inbox.received[0]["text"] == "[cdc shop] WARN: this is a test"


def test_the_log_has_problems_and_recoveries(caplog: pytest.LogCaptureFixture) -> None:
    config, memory = _config(min_interval=0), Memory()
    for step, found in enumerate(([_condition()], [])):
        now = START + timedelta(seconds=step)
        memory, _ = due(observe(memory, found, now), config.alerts, now)
        memory, _ = deliver(config, memory)
    assert [(r.levelname, r.getMessage().splitlines()[0]) for r in caplog.records] == [
        ("ERROR", "shop: FAIL: flusher is wrong"),
        ("WARNING", "shop: OK (was FAIL): no longer: flusher is wrong"),
    ]


def test_a_sink_that_hangs_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "_TIMEOUT_SECONDS", 0.2)
    with webhook() as inbox, socket.create_server(("127.0.0.1", 0)) as silent:
        hanging = Inbox(port=silent.getsockname()[1])
        config = _config(_webhook(hanging), _webhook(inbox))
        memory, [problem] = _send(config, _condition())
    assert problem.startswith("0:webhook took no message: TimeoutError")
    assert (list(memory.outbox), len(inbox.received)) == (["0:webhook"], 1)


def test_a_reply_that_is_none_and_a_message_that_cannot_be_made_hold_up_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with webhook() as inbox, socket.create_server(("127.0.0.1", 0)) as server:

        def talk() -> None:
            with suppress(OSError):
                while True:
                    client, _ = server.accept()
                    with client:
                        client.recv(10_000)
                        client.sendall(b"garbage\r\n\r\n")

        threading.Thread(target=talk, daemon=True).start()
        odd = Inbox(port=server.getsockname()[1])
        config = _config(_webhook(odd), _webhook(inbox))
        memory, [problem] = _send(config, _condition())
        assert problem == "0:webhook took no message: BadStatusLine; 1 wait"
        assert (list(memory.outbox), len(inbox.received)) == (["0:webhook"], 1)
        post, bodies = sinks._post, list[Any]()

        def choosy(sink: Any, body: Any) -> None:
            bodies.append(body)
            if len(bodies) == 1:
                raise ValueError("not a header")
            post(sink, body)

        monkeypatch.setattr(sinks, "_post", choosy)
        waiting = {"0:webhook": memory.outbox["0:webhook"] * 2}
        memory, [problem] = deliver(_config(_webhook(inbox)), Memory(outbox=waiting))
        assert problem == "0:webhook can't be given a message, which is left out: ValueError"
        assert (memory.outbox, len(inbox.received)) == ({}, 2)


def test_a_sink_that_is_down_for_long_gets_the_newest() -> None:
    config = _config({"type": "log"}, min_interval=0)
    memory, now = Memory(), START
    for step in range(OUTBOX + 10):
        now = START + timedelta(seconds=step)
        memory, _ = due(observe(memory, [_condition(f"k{step}")], now), config.alerts, now)
    assert len(memory.outbox["0:log"]) == OUTBOX
    assert memory.outbox["0:log"][-1].notices[0]["key"] == f"k{OUTBOX + 9}"


def test_a_sink_may_want_failures_only_and_their_recovery() -> None:
    with webhook() as inbox:
        config = _config(_webhook(inbox, min_severity="fail"), min_interval=0)
        memory = Memory()
        for step, found in enumerate(([_condition("a", WARN)], [_condition("a")], [])):
            now = START + timedelta(seconds=step)
            memory, _ = due(observe(memory, found, now), config.alerts, now)
            memory, _ = deliver(config, memory)
    assert [body["text"] for body in inbox.received] == [
        "[cdc shop] FAIL (was WARN): a is wrong",
        "[cdc shop] OK (was FAIL): no longer: a is wrong",
    ]


def test_mail_arrives_by_smtp() -> None:
    with mailbox() as inbox:
        inbox.refusals = 1
        sink = {
            "type": "mail",
            "host": "127.0.0.1",
            "port": inbox.port,
            "security": "none",
            "from": "cdc@example.com",
            "to": ["ops@example.com", "dba@example.com"],
        }
        _, problems = _send(_config(sink), _condition("größe\r\nBcc: x"))
    assert problems == []
    mail = email.message_from_string(inbox.received[0], policy=email.policy.default)
    assert mail["Subject"] == "[cdc shop] FAIL: größe Bcc: x is wrong"
    assert mail["To"] == "ops@example.com, dba@example.com"
    assert mail.get_content().replace("\r", "").splitlines() == [
        "Source shop:",
        "FAIL: größe Bcc: x is wrong",
        "  since 2026-01-01 00:00:00 UTC, 0 s: very",
        "  do: do something",
    ]


def test_an_sns_topic_gets_the_message() -> None:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    try:
        settings: dict[str, Any] = {"region_name": "us-east-1", "endpoint_url": endpoint}
        sns, sqs = boto3.client("sns", **settings), boto3.client("sqs", **settings)
        topic = sns.create_topic(Name="alerts")["TopicArn"]
        queue = sqs.create_queue(QueueName="alerts")["QueueUrl"]
        attributes = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["QueueArn"])
        sns.subscribe(TopicArn=topic, Protocol="sqs", Endpoint=attributes["Attributes"]["QueueArn"])
        sink = {"type": "sns", "topic_arn": topic, "endpoint": endpoint}
        assert _send(_config(sink), _condition())[1] == []
        queue = endpoint + urlsplit(queue).path
        [received] = sqs.receive_message(QueueUrl=queue, WaitTimeSeconds=5)["Messages"]
    finally:
        server.stop()
    body = json.loads(received["Body"])
    assert body["Subject"] == "[cdc shop] FAIL: flusher is wrong"
    assert body["Message"].splitlines()[-1] == "  do: do something"


@pytest.mark.parametrize(
    ("alerts", "culprit"),
    [
        ({"sinks": [{"type": "pager"}]}, "alerts.sinks.0"),
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
    with pytest.raises(ConfigurationError, match=culprit.replace(".", r"\.")) as raised:
        parse_config({**json.loads(_config().dump()), "alerts": alerts}, "test")
    assert TOKEN not in str(raised.value)


@pytest.mark.parametrize("security", ["tls", "starttls"])
def test_mail_is_not_given_to_a_server_that_nobody_vouches_for(
    tmp_path: Path, security: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody can make a certificate of their own; the password must not get there."""
    monkeypatch.setattr(sinks, "_ATTEMPTS", 1)
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=localhost", "-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            client, _ = server.accept()
            with client, suppress(OSError):
                if security == "starttls":
                    client.sendall(b"220 hello\r\n")
                    client.recv(1000)
                    client.sendall(b"250-hello\r\n250 STARTTLS\r\n")
                    client.recv(1000)
                    client.sendall(b"220 go on\r\n")
                with context.wrap_socket(client, server_side=True) as secure:
                    heard.append(b"a handshake")
                    secure.sendall(b"220 hello\r\n")
                    heard.append(secure.recv(1000))

        thread = threading.Thread(target=serve)
        thread.start()
        config = _config(
            {
                "type": "mail",
                "host": "localhost",
                "port": server.getsockname()[1],
                "security": security,
                "username": "cdc",
                "password": TOKEN,
                "from": "cdc@example.com",
                "to": ["ops@example.com"],
            }
        )
        notice = Notice("k", "problem", "fail", None, "w", "d", "r", START.isoformat(), 0.0)
        with pytest.raises(ssl.SSLCertVerificationError):
            sinks.send(config, config.alerts.sinks[0], [notice])
        thread.join(30)
    assert heard == []
