"""Messages about conditions, and real servers as sinks."""

from __future__ import annotations

import email
import email.policy
import json
import socket
import ssl
import subprocess
import threading
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
from click.testing import CliRunner
from moto.server import ThreadedMotoServer

from cdc_assets.cli.main import cli
from cdc_assets.config.source import SourceConfig
from cdc_assets.observe import sinks
from cdc_assets.observe.condition import WARN, Condition
from cdc_assets.observe.notices import Memory, Notice, due, observe
from cdc_assets.observe.outbox import deliver
from cdc_assets_tests.support.alerts import START, TOKEN, condition, config_of, to_mail, to_webhook
from cdc_assets_tests.support.sinks import Inbox, mailbox, webhook


def _send(config: SourceConfig, *found: Condition) -> tuple[Memory, list[str]]:
    memory, _ = due(observe(Memory(), found, START), config.alerts, START)
    return deliver(config, memory)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda _: None)


def test_a_webhook_gets_what_slack_takes_and_is_tried_again() -> None:
    with webhook() as inbox:
        inbox.refusals = 2
        memory, problems = _send(
            config_of(to_webhook(inbox)), condition("b", WARN), condition("<a> & co")
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
        config = config_of(to_webhook(inbox), {"type": "log"})
        memory, [problem] = _send(config, condition())
        assert problem == "0:webhook took no message: HTTPError 503; 1 wait"
        assert list(memory.outbox) == ["0:webhook"], "the log has taken it"
        assert TOKEN not in memory.dump()
        again, problems = deliver(config, Memory.load(memory.dump()))
        assert (again.outbox, problems, len(inbox.received)) == ({}, [], 1)
    _, [gone] = _send(config, condition())
    assert gone == "0:webhook took no message: ConnectionRefusedError; 1 wait"


def test_a_test_message_says_whether_it_was_taken(tmp_path: Path) -> None:
    with webhook() as inbox:
        config = config_of(to_webhook(inbox), to_webhook(Inbox(port=1)))
        file = tmp_path / "shop.json"
        file.write_text(config.dump())
        done = CliRunner().invoke(cli, ["--config", str(file), "alert-test"])
    assert (done.exit_code, done.output.splitlines()) == (
        1,
        ["0:webhook: sent", "1:webhook: ConnectionRefusedError"],
    )
    assert inbox.received[0]["text"] == "[cdc shop] WARN: this is a test"


def test_the_log_has_problems_and_recoveries(caplog: pytest.LogCaptureFixture) -> None:
    config, memory = config_of(), Memory()
    for step, found in enumerate(([condition()], [])):
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
        config = config_of(to_webhook(hanging), to_webhook(inbox))
        memory, [problem] = _send(config, condition())
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
        config = config_of(to_webhook(odd), to_webhook(inbox))
        memory, [problem] = _send(config, condition())
        assert problem == "0:webhook took no message: BadStatusLine; 1 wait"
        assert (list(memory.outbox), len(inbox.received)) == (["0:webhook"], 1)
        send, posts = sinks._post, list[Any]()

        def choosy(post: Any) -> None:
            posts.append(post)
            if len(posts) == 1:
                raise ValueError("not a header")
            send(post)

        monkeypatch.setattr(sinks, "_post", choosy)
        waiting = {"0:webhook": memory.outbox["0:webhook"] * 2}
        memory, [problem] = deliver(config_of(to_webhook(inbox)), Memory(outbox=waiting))
        assert problem == "0:webhook can't be given a message, which is left out: ValueError"
        assert (memory.outbox, len(inbox.received)) == ({}, 2)


def test_a_sink_may_want_failures_only_and_their_recovery() -> None:
    with webhook() as inbox:
        config = config_of(to_webhook(inbox, min_severity="fail"))
        memory = Memory()
        for step, found in enumerate(([condition("a", WARN)], [condition("a")], [])):
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
        sink = {**to_mail(inbox), "to": ["ops@example.com", "dba@example.com"]}
        _, problems = _send(config_of(sink), condition("größe\r\nBcc: x"))
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
        assert _send(config_of(sink), condition())[1] == []
        queue = endpoint + urlsplit(queue).path
        [received] = sqs.receive_message(QueueUrl=queue, WaitTimeSeconds=5)["Messages"]
    finally:
        server.stop()
    body = json.loads(received["Body"])
    assert body["Subject"] == "[cdc shop] FAIL: flusher is wrong"
    assert body["Message"].splitlines()[-1] == "  do: do something"


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
        config = config_of(
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
