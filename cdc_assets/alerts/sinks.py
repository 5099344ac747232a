"""Where notices go: a log, a webhook, an SNS topic, mail. One message for all notices of a moment.

A message is tried a few times with short time-outs; what a sink doesn't take stays in the memory's
outbox and is tried again at the next look, so a message may come twice but isn't lost. An address
may be a secret: none is ever in an error or a log.
"""

from __future__ import annotations

import json
import logging
import smtplib
import ssl
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from email.message import EmailMessage
from http.client import HTTPException
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from cdc_assets.alerts import message
from cdc_assets.alerts.memory import Memory, Notice, sink_keys
from cdc_assets.alerts.settings import LogSink, MailSink, SinkConfig, SnsSink, WebhookSink
from cdc_assets.config import SourceConfig

logger = logging.getLogger(__name__)

_TIMEOUT_SECONDS = 5.0
_ATTEMPTS = 3
# The sensor that delivers has a minute for everything; a message under way may take 20 s more.
_BUDGET_SECONDS = 15.0
_TRANSIENT = (OSError, HTTPException, smtplib.SMTPException, BotoCoreError, ClientError)
# SNS takes 100 characters of plain ASCII, and a mail's subject reads no better when it is longer.
_SUBJECT = 100
# A recovery has to be where the problem was told: a log without settings has no INFO.
_LEVELS = {"fail": logging.ERROR, "warn": logging.WARNING, None: logging.WARNING}


def deliver(config: SourceConfig, memory: Memory) -> tuple[Memory, list[str]]:
    """Empty the outbox; what couldn't be delivered stays in it, and is said.

    A sink that hangs holds up no other one, nor does a message that can't be made.
    """
    deadline = time.monotonic() + _BUDGET_SECONDS

    def empty(key: str, sink: SinkConfig) -> tuple[list[list[dict[str, Any]]], str | None]:
        left, problem = list(memory.outbox.get(key, [])), None
        while left and time.monotonic() < deadline:
            try:
                send(config, sink, [Notice(**notice) for notice in left[0]])
            except _TRANSIENT as error:
                return left, f"{key} took no message: {_said(error)}; {len(left)} wait"
            except Exception as error:  # noqa: BLE001 - tried again it would fail again
                problem = f"{key} can't be given a message, which is left out: {_said(error)}"
            left.pop(0)
        return left, problem

    keys, sinks = sink_keys(config.alerts), config.alerts.sinks
    with ThreadPoolExecutor(max(1, len(sinks))) as pool:
        done = list(pool.map(empty, keys, sinks))
    outbox = {key: left for key, (left, _) in zip(keys, done, strict=True) if left}
    return replace(memory, outbox=outbox), [problem for _, problem in done if problem]


def try_sinks(config: SourceConfig) -> dict[str, str | None]:
    """Send every sink a message that says that it is a test; why it failed, by sink."""
    now = datetime.now(UTC).isoformat()
    what, help_ = "this is a test", "Nothing: all is well."
    notice = Notice("test", "problem", "warn", None, what, "it was asked for", help_, now, 0.0)
    told: dict[str, str | None] = {}
    for key, sink in zip(sink_keys(config.alerts), config.alerts.sinks, strict=True):
        try:
            send(config, sink, [notice])
            told[key] = None
        except _TRANSIENT as error:
            told[key] = _said(error)
    return told


def send(config: SourceConfig, sink: SinkConfig, notices: Sequence[Notice]) -> None:
    """Send one message. Raises what the last attempt raised."""
    for attempt in Retrying(
        stop=stop_after_attempt(_ATTEMPTS),
        wait=wait_random_exponential(multiplier=0.5, max=4),
        retry=retry_if_exception_type(_TRANSIENT),
        reraise=True,
    ):
        with attempt:
            _send(config, sink, notices)


def _send(config: SourceConfig, sink: SinkConfig, notices: Sequence[Notice]) -> None:
    if isinstance(sink, LogSink):
        for notice in notices:
            said = "\n".join(message.lines(notice))
            logger.log(_LEVELS[notice.severity], "%s: %s", config.name, said)
    elif isinstance(sink, WebhookSink):
        _post(sink, message.slack(config.name, notices))
    elif isinstance(sink, SnsSink):
        _publish(config, sink, notices)
    else:
        _mail(config, sink, notices)


def _post(sink: WebhookSink, body: dict[str, Any]) -> None:
    request = urllib.request.Request(  # noqa: S310 -- http and https only, by the configuration
        sink.url.get_secret_value(),
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "User-Agent": "cdc-assets"},
    )
    with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:  # noqa: S310
        answer.read()


def _publish(config: SourceConfig, sink: SnsSink, notices: Sequence[Notice]) -> None:
    import boto3  # comes with dagster-aws; it takes half a second
    from botocore.config import Config

    client = boto3.client(
        "sns",
        region_name=sink.topic_arn.split(":")[3],
        endpoint_url=sink.endpoint,
        config=Config(
            connect_timeout=_TIMEOUT_SECONDS,
            read_timeout=_TIMEOUT_SECONDS,
            retries={"total_max_attempts": 1},  # they are counted here
        ),
    )
    subject = message.subject(config.name, notices)[:_SUBJECT]
    client.publish(
        TopicArn=sink.topic_arn,
        Subject=subject.encode("ascii", "replace").decode(),
        Message=message.text(config.name, notices),
    )


def _mail(config: SourceConfig, sink: MailSink, notices: Sequence[Notice]) -> None:
    mail = EmailMessage()
    mail["Subject"] = message.subject(config.name, notices)[:_SUBJECT]
    mail["From"], mail["To"] = sink.sender, ", ".join(sink.to)
    mail.set_content(message.text(config.name, notices), cte="quoted-printable")  # pure ASCII
    context = ssl.create_default_context()  # smtplib's own believes any certificate
    where = (sink.host, sink.port)
    with ExitStack() as stack:
        server: smtplib.SMTP
        if sink.security == "tls":
            server = smtplib.SMTP_SSL(*where, timeout=_TIMEOUT_SECONDS, context=context)
        else:
            server = smtplib.SMTP(*where, timeout=_TIMEOUT_SECONDS)
        stack.enter_context(server)
        if sink.security == "starttls":
            server.starttls(context=context)
        if sink.username is not None and sink.password is not None:
            server.login(sink.username, sink.password.get_secret_value())
        server.send_message(mail)


def _said(error: Exception) -> str:
    # The text of an error may have the address in it; its kind and an HTTP status don't.
    status = getattr(error, "code", None) or getattr(error, "smtp_code", None)
    reason = getattr(error, "reason", None)
    name = type(reason).__name__ if isinstance(reason, Exception) else type(error).__name__
    return f"{name} {status}" if status else name
