"""What a notice reads like: for a log, a mail, and Slack. What, since when, how bad, what helps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cdc_assets.alerts.memory import Notice

# Slack cuts a longer text off, and a person reads no more either.
_SHOWN = 20
_COLOURS = {"fail": "#d0342c", "warn": "#e6a117", None: "#2e8b57"}


def lasted(seconds: float) -> str:
    """A span as a person says it."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def heading(notice: Notice) -> str:
    """Its state and what it is, in one line."""
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
    """The worst first; how many more. It is one line, whatever a table is called."""
    first = " ".join(f"[cdc {source}] {heading(notices[0])}".split())
    return first if len(notices) == 1 else f"{first} (and {len(notices) - 1} more)"


def text(source: str, notices: Sequence[Notice]) -> str:
    """All of them for a mail."""
    said = [line for notice in notices for line in lines(notice)]
    return "\n".join([f"Source {source}:", *said])


def slack(source: str, notices: Sequence[Notice]) -> dict[str, Any]:
    """JSON for an incoming webhook: https://docs.slack.dev/messaging/sending-messages-using-incoming-webhooks."""
    shown, more = notices[:_SHOWN], len(notices) - _SHOWN
    attachments = [
        {
            "color": _COLOURS[notice.severity],
            "title": _escaped(heading(notice)),
            "text": _escaped("\n".join(line.strip() for line in lines(notice)[1:])),
            "fallback": _escaped(heading(notice)),
        }
        for notice in shown
    ]
    if more > 0:
        attachments.append({"text": f"… and {more} more; cdc-assets status shows all."})
    return {"text": _escaped(subject(source, notices)), "attachments": attachments}


def _escaped(said: str) -> str:
    return said.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
