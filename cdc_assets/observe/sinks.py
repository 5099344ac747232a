"""Where notices go: a log, a webhook, an SNS topic, mail. One message for all notices of a moment.

A message is tried a few times with short time-outs; ``outbox`` decides what becomes of one that
isn't taken. An address may be a secret: none is ever in an error or a log, and a webhook's redirect
isn't followed. SNS is spoken to by boto3 itself: dagster-aws has no resource of it.
"""

from __future__ import annotations

import json
import logging
import smtplib
import ssl
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from email.message import EmailMessage
from http.client import HTTPException
from urllib.error import HTTPError, URLError

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    ProxyConnectionError,
)
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from cdc_assets.config.alerts import LogSink, MailSink, SinkConfig, SnsSink, WebhookSink, sink_keys
from cdc_assets.config.source import SourceConfig
from cdc_assets.observe import message
from cdc_assets.observe.notices import Notice

logger = logging.getLogger(__name__)

_TIMEOUT_SECONDS = 5.0
_ATTEMPTS = 3
_ANSWER_BYTES = 64 * 1024
TRANSIENT = (OSError, HTTPException, smtplib.SMTPException, BotoCoreError, ClientError)
# Statuses about the sender, the address or the rate, not about this message.
_NOT_THE_MESSAGE = frozenset({401, 402, 403, 404, 405, 407, 408, 410, 421, 423, 425, 429, 451})
# A recovery has to appear where the problem did: a log without settings has no INFO.
_LEVELS = {"fail": logging.ERROR, "warn": logging.WARNING, None: logging.WARNING}


def try_sinks(config: SourceConfig) -> dict[str, str | None]:
    """Send every sink a test message; returns by sink why it failed, None if it didn't."""
    now = datetime.now(UTC).isoformat()
    what, help_ = "this is a test", "Nothing: all is well."
    notice = Notice("test", "problem", "warn", None, what, "it was asked for", help_, now, 0.0)
    told: dict[str, str | None] = {}
    for key, sink in zip(sink_keys(config.alerts), config.alerts.sinks, strict=True):
        try:
            send(config, sink, [notice])
            if isinstance(sink, WebhookSink) and sink.keeps_incidents:
                over = replace(notice, kind="recovered", severity=None, before="warn")
                send(config, sink, [over])
            told[key] = None
        except TRANSIENT as error:
            told[key] = said(error)
    return told


def send(config: SourceConfig, sink: SinkConfig, notices: Sequence[Notice]) -> None:
    """Send one message. Raises what the last attempt raised."""
    for attempt in Retrying(
        stop=stop_after_attempt(_ATTEMPTS),
        wait=wait_random_exponential(multiplier=0.5, max=4),
        retry=retry_if_exception(lambda error: isinstance(error, TRANSIENT) and not refused(error)),
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
        for post in message.posts(sink, config.name, notices):
            _post(post)
    elif isinstance(sink, SnsSink):
        _publish(config, sink, notices)
    else:
        _mail(config, sink, notices)


class _StayThere(urllib.request.HTTPRedirectHandler):
    """A redirect counts as a refusal: what is meant for one address isn't sent to another."""

    def redirect_request(self, *_: object) -> None:
        return None


_OPENER = urllib.request.build_opener(_StayThere)


def _post(post: message.Post) -> None:
    request = urllib.request.Request(  # noqa: S310 -- http and https only, by the configuration
        post.address,
        json.dumps(post.body, ensure_ascii=False).encode(),
        {"Content-Type": "application/json", "User-Agent": "cdc-assets", **post.headers},
        method=post.method,
    )
    with _OPENER.open(request, timeout=_TIMEOUT_SECONDS) as answer:
        answer.read(_ANSWER_BYTES)


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
            retries={"total_max_attempts": 1},  # ``send`` counts them
        ),
    )
    subject = message.subject(config.name, notices)
    client.publish(
        TopicArn=sink.topic_arn,
        Subject=subject.encode("ascii", "replace").decode(),
        Message=message.text(config.name, notices),
    )


def _mail(config: SourceConfig, sink: MailSink, notices: Sequence[Notice]) -> None:
    mail = EmailMessage()
    mail["Subject"] = message.subject(config.name, notices)
    mail["From"], mail["To"] = sink.sender, ", ".join(sink.to)
    mail.set_content(message.text(config.name, notices), cte="quoted-printable")  # pure ASCII
    context = ssl.create_default_context()  # smtplib's own accepts any certificate
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


def refused(error: BaseException) -> bool:
    """Whether the sink refuses this message, so that another try won't help."""
    if isinstance(error, HTTPError):
        return 400 <= error.code < 500 and error.code not in _NOT_THE_MESSAGE
    if isinstance(error, smtplib.SMTPDataError):
        return error.smtp_code >= 500
    if isinstance(error, ClientError):
        return str(error.response.get("Error", {}).get("Code", "")).startswith("InvalidParameter")
    return False


def away(sink: SinkConfig, error: BaseException) -> bool:
    """Whether the sink wasn't reached, or opened no session: no other message would get there.

    False for a connection that ends, or is silent, once the message is under way: the message may
    be the cause.
    """
    if isinstance(error, HTTPError):
        return False
    if isinstance(error, URLError):  # until the request is sent
        lost = isinstance(error.reason, ConnectionError)
        return not lost or isinstance(error.reason, ConnectionRefusedError)
    if isinstance(sink, MailSink):  # others than SMTP's own are of the socket that is to be opened
        opening = (smtplib.SMTPConnectError, smtplib.SMTPHeloError)
        return not isinstance(error, smtplib.SMTPException) or isinstance(error, opening)
    return isinstance(error, EndpointConnectionError | ConnectTimeoutError | ProxyConnectionError)


def said(error: Exception) -> str:
    """An error of a sink, without its text, which may have the address in it."""
    status = getattr(error, "code", None) or getattr(error, "smtp_code", None)
    reason = getattr(error, "reason", None)
    name = type(reason).__name__ if isinstance(reason, Exception) else type(error).__name__
    return f"{name} {status}" if status else name
