"""What is said of notices in a log, a mail, a chat or to who is on call: what, how bad, what helps.

A service for who is on call has one incident a problem: it is named alike each time, so that a
message that comes twice changes nothing, and is closed once the problem is over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any
from urllib.parse import quote

from cdc_assets.config.alerts import WebhookSink
from cdc_assets.messages.texts import bounded, header, markdown, one_line, plain
from cdc_assets.observe.notices import Notice

# A person reads no more. Slack takes 40,000 characters (an & is five), SNS 256 KiB.
_SHOWN, _SLACK_LENGTH = 20, 30_000
_TEXT_SHOWN, _TEXT_LENGTH = 100, 60_000
# Teams takes 28 KB, and a character may be several bytes. Of an incident: what a person reads.
_CARD_LENGTH, _DETAIL_LENGTH = 6_000, 2_000
_CARD_COLOURS = {"fail": "Attention", "warn": "Warning", None: "Good"}
_COLOURS = {"fail": "#d0342c", "warn": "#e6a117", None: "#2e8b57"}


def lasted(seconds: float) -> str:
    """A span as a person says it."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def heading(notice: Notice) -> str:
    """The notice's state and subject, in one line."""
    state = "OK" if notice.severity is None else notice.severity.upper()
    change = {
        "problem": "",
        "worse": " (was WARN)",
        "better": f" (was {(notice.before or '').upper()})",
        "reminder": " (still)",
        "recovered": f" (was {(notice.before or '').upper()})",
    }[notice.kind]
    what = f"no longer: {notice.what}" if notice.severity is None else notice.what
    return f"{state}{change}: {what}"


def lines(notice: Notice) -> list[str]:
    """The whole notice, for a log or a mail."""
    since = notice.since[:19].replace("T", " ")
    if notice.severity is None:
        return [heading(notice), f"  it lasted {lasted(notice.lasted_seconds)}, since {since} UTC"]
    return [
        heading(notice),
        f"  since {since} UTC, {lasted(notice.lasted_seconds)}: {notice.detail}",
        f"  do: {notice.remedy}",
    ]


def subject(source: str, notices: Sequence[Notice]) -> str:
    """The worst notice, and how many more: one short line, however long a table's name is."""
    more = f" (and {len(notices) - 1} more)" if len(notices) > 1 else ""
    return header(f"[cdc {source}] {heading(notices[0])}", end=more)


def text(source: str, notices: Sequence[Notice]) -> str:
    """All of them for a mail or a topic, as far as a person reads and a topic takes them."""
    said, length = [f"Source {source}:"], 0
    for notice in notices[:_TEXT_SHOWN]:
        told = "\n".join(plain(line) for line in lines(notice))
        length += len(told)
        if length > _TEXT_LENGTH:
            break
        said.append(told)
    return "\n".join([*said, *_more(len(notices) + 1 - len(said))])


def _more(left: int) -> list[str]:
    return [f"… and {left} more; cdc-assets status shows all."] if left else []


def slack(source: str, notices: Sequence[Notice]) -> dict[str, Any]:
    """JSON for an incoming webhook: https://docs.slack.dev/messaging/sending-messages-using-incoming-webhooks.

    None of it is markup, and no address in a name is fetched for a preview.
    """
    attachments: list[dict[str, Any]] = []
    length = 0
    for notice in notices[:_SHOWN]:
        title = _escaped(heading(notice))
        told = _escaped("\n".join(line.strip() for line in lines(notice)[1:]))
        length += 2 * len(title) + len(told)
        if length > _SLACK_LENGTH:
            break
        attachments.append(
            {
                "color": _COLOURS[notice.severity],
                "title": title,
                "text": told,
                "fallback": title,
                "mrkdwn_in": [],
            }
        )
    attachments += [{"text": said} for said in _more(len(notices) - len(attachments))]
    return {
        "text": _escaped(subject(source, notices)),
        "mrkdwn": False,
        "unfurl_links": False,
        "unfurl_media": False,
        "attachments": attachments,
    }


@dataclass(frozen=True, slots=True)
class Post:
    """One request to a webhook. The address and the headers may be secrets."""

    address: str = field(repr=False)
    body: Mapping[str, Any] = field(repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    method: str = "POST"


def posts(sink: WebhookSink, source: str, notices: Sequence[Notice]) -> list[Post]:
    """The requests that tell a sink of notices: one, or one a notice."""
    key = sink.key.get_secret_value() if sink.key is not None else ""
    if sink.format == "pagerduty":
        return [Post(sink.address, _pagerduty(source, notice, key)) for notice in notices]
    if sink.format == "opsgenie":
        return [one for notice in notices for one in _opsgenie(sink.address, source, notice, key)]
    made = teams if sink.format == "teams" else slack
    return [Post(sink.address, made(source, notices))]


def _incident(source: str, notice: Notice) -> str:
    """The name of a problem's incident: short, and the same for as long as it lasts."""
    name = f"cdc_assets/{source}/{notice.key}"
    return name if len(name) <= 200 else f"{name[:160]}/{sha256(name.encode()).hexdigest()[:32]}"


def _pagerduty(source: str, notice: Notice, key: str) -> dict[str, Any]:
    """An event as https://developer.pagerduty.com/docs/send-alert-event has it."""
    event = {"routing_key": key, "dedup_key": _incident(source, notice)}
    if notice.severity is None:
        return {**event, "event_action": "resolve"}
    payload = {
        "summary": bounded(f"[cdc {source}] {one_line(heading(notice))}", 1024),
        "source": source,
        "severity": {"fail": "critical", "warn": "warning"}[notice.severity],
        "component": bounded(one_line(notice.key), 200),
        "custom_details": {
            "since": notice.since,
            "detail": bounded(plain(notice.detail), _DETAIL_LENGTH),
            "do": bounded(plain(notice.remedy), _DETAIL_LENGTH),
        },
    }
    return {**event, "event_action": "trigger", "client": "cdc_assets", "payload": payload}


def _opsgenie(address: str, source: str, notice: Notice, key: str) -> list[Post]:
    """Requests as https://docs.opsgenie.com/docs/alert-api has them.

    An alert that is open keeps its priority when it is made again, so that is changed by itself.
    """
    headers, name = {"Authorization": f"GenieKey {key}"}, _incident(source, notice)
    alert = f"{address.rstrip('/')}/{quote(name, safe='')}"
    if notice.severity is None:
        said = {"source": "cdc_assets", "note": heading(notice)}
        return [Post(f"{alert}/close?identifierType=alias", said, headers)]
    priority = {"fail": "P1", "warn": "P3"}[notice.severity]
    changed = Post(f"{alert}/priority?identifierType=alias", {"priority": priority}, headers, "PUT")
    told = "\n".join(plain(line) for line in lines(notice))
    body = {
        "message": bounded(f"[cdc {source}] {one_line(heading(notice))}", 130),
        "alias": name,
        "description": bounded(told, 15_000),
        "priority": priority,
        "source": "cdc_assets",
        "entity": source,
        "tags": ["cdc_assets", source],
    }
    made = Post(address, body, headers)
    return [made, changed] if notice.kind in ("worse", "better") else [made]


def teams(source: str, notices: Sequence[Notice]) -> dict[str, Any]:
    """An adaptive card, as a workflow for a channel posts it.

    https://learn.microsoft.com/microsoftteams/platform/webhooks-and-connectors/how-to/add-incoming-webhook
    """
    blocks: list[dict[str, Any]] = [_block(subject(source, notices), weight="Bolder")]
    length = 0
    for notice in notices[:_SHOWN]:
        told = [_block(heading(notice), color=_CARD_COLOURS[notice.severity], separator=True)]
        told += [_block(line.strip(), isSubtle=True) for line in lines(notice)[1:]]
        length += sum(len(block["text"]) for block in told)
        if length > _CARD_LENGTH:
            break
        blocks += told
    shown = sum("separator" in block for block in blocks)
    blocks += [_block(said) for said in _more(len(notices) - shown)]
    card = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.4",
        "body": blocks,
    }
    kind = "application/vnd.microsoft.card.adaptive"
    return {"type": "message", "attachments": [{"contentType": kind, "content": card}]}


def _block(said: str, **more: Any) -> dict[str, Any]:
    """A text block, in which a card takes some of Markdown for markup: none of it is."""
    return {"type": "TextBlock", "wrap": True, "text": markdown(said), **more}


def _escaped(said: str) -> str:
    return plain(said).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
