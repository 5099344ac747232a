"""The text of notices for a log, a mail, and Slack: what, since when, how bad, what helps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cdc_assets.messages.texts import header, plain
from cdc_assets.observe.notices import Notice

# A person reads no more. Slack takes 40,000 characters (an & is five), SNS 256 KiB.
_SHOWN, _SLACK_LENGTH = 20, 30_000
_TEXT_SHOWN, _TEXT_LENGTH = 100, 60_000
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


def _escaped(said: str) -> str:
    return plain(said).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
