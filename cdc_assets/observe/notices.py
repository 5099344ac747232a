"""From conditions to notices: what changed since the last report. Pure functions over a memory.

A key is reported when its grade differs from the one reported last, when it was worse in between,
and again after ``remind``. The rate limit loses nothing: changes before the next message is due are
in that one, and a condition that came and went meanwhile is in it with its worst grade.

The memory is plain JSON, so that a sensor's cursor can hold it; keys that are well aren't in it.
Names and errors are stored as plain text of a bounded length (``messages.texts``), so that each
sink can take every message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, Self

from cdc_assets.config.alerts import AlertsConfig, Severity, WebhookSink, sink_keys
from cdc_assets.messages.texts import bounded, one_line
from cdc_assets.observe.condition import Condition

Kind = Literal["problem", "worse", "better", "reminder", "recovered"]
_RANK: dict[Severity | None, int] = {None: 0, "warn": 1, "fail": 2}
# A sink that was down for long gets only the newest ones when it is back.
OUTBOX = 50
# A message to who is on call has one notice, and each counts.
INCIDENTS = 500
# A sentence is read to its end, a reason of a hundred kilobytes isn't.
_LENGTH = 800


@dataclass(frozen=True, slots=True)
class Notice:
    """One transition, as it is reported. Times are ISO; ``severity`` is None once it is well."""

    key: str
    kind: Kind
    severity: Severity | None
    before: Severity | None
    what: str
    detail: str
    remedy: str
    since: str
    lasted_seconds: float
    worst: Severity | None = None
    """The worst that was told of it since it was well last."""

    @property
    def rank(self) -> int:
        """How bad it is or was, whichever is worse: for sinks with a ``min_severity``."""
        return max(_RANK[self.severity], _RANK[self.before], _RANK[self.worst])


@dataclass(frozen=True, slots=True)
class Known:
    """What is remembered of a key: since when, how bad it is, what was reported and when."""

    since: str
    what: str
    detail: str
    remedy: str
    present: bool = True
    grade: Severity | None = None
    told: Severity | None = None
    worst: Severity | None = None
    told_at: str | None = None
    bad_since: str | None = None
    """Since when it had a grade, when it had one last: what a recovery tells."""
    told_worst: Severity | None = None
    """The worst that was told since it was well last: who was told that is told of its end."""
    told_what: str = ""
    """What it was when it was told last: that is what a recovery is of."""

    @property
    def matters(self) -> bool:
        """Whether there is anything to remember, or to report."""
        return self.present or self.told is not None or self.worst is not None


@dataclass(frozen=True, slots=True)
class Waiting:
    """A message that a sink hasn't taken yet; ``notices`` has each :class:`Notice` as a dictionary.

    ``tries``: looks at which it was tried. ``refused``: looks at which the sink refused it, or took
    another message instead.
    """

    notices: list[dict[str, Any]]
    tries: int = 0
    refused: int = 0
    said: str = ""


@dataclass(frozen=True, slots=True)
class Memory:
    """What is known of every key that isn't well, and what waits to be delivered, by sink."""

    known: dict[str, Known] = field(default_factory=dict)
    sent_at: str | None = None
    outbox: dict[str, list[Waiting]] = field(default_factory=dict)

    def dump(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def load(cls, text: str | None) -> Self:
        """The memory as it was dumped; an empty one if another version wrote it in its own form."""
        if not text:
            return cls()
        try:
            data = json.loads(text)
            known = {key: Known(**value) for key, value in data["known"].items()}
            outbox = {
                sink: [Waiting(**w) if isinstance(w, dict) else Waiting(w) for w in waiting]
                for sink, waiting in data["outbox"].items()
            }
            return cls(known, data["sent_at"], outbox)
        except (ValueError, TypeError, KeyError, AttributeError):
            return cls()


def severest(*grades: Severity | None) -> Severity | None:
    return max(grades, key=_RANK.__getitem__)


def observe(
    memory: Memory,
    found: Iterable[Condition],
    now: datetime,
    unknown: Callable[[str], bool] = lambda _: False,
) -> Memory:
    """Take in what is wrong now; a key that is ``unknown`` stays as it was."""
    known: dict[str, Known] = {}
    for condition in found:
        key, before = condition.key, memory.known.get(condition.key)
        since = condition.since or now
        if condition.since is None and before is not None and before.present:
            since = _time(before.since)
        grade = condition.limits.grade((now - since).total_seconds())
        here = known.get(key)
        if here is not None and _RANK[here.grade] >= _RANK[grade]:
            continue
        known[key] = Known(
            since.isoformat(),
            bounded(one_line(condition.what), _LENGTH),
            bounded(one_line(condition.detail), _LENGTH),
            bounded(one_line(condition.remedy), _LENGTH),
            present=grade is not None or condition.since is None,
            grade=grade,
            told=before.told if before is not None else None,
            worst=severest(grade, before.worst if before is not None else None),
            told_at=before.told_at if before is not None else None,
            bad_since=since.isoformat() if grade else before.bad_since if before else None,
            told_worst=before.told_worst if before is not None else None,
            told_what=before.told_what if before is not None else "",
        )
    for key, before in memory.known.items():
        if key not in known:
            known[key] = before if unknown(key) else replace(before, present=False, grade=None)
    return replace(memory, known={key: k for key, k in known.items() if k.matters})


def due(memory: Memory, config: AlertsConfig, now: datetime) -> tuple[Memory, list[Notice]]:
    """The notices due now; in the memory they are marked as reported, and queued for every sink."""
    if memory.sent_at and now - _time(memory.sent_at) < config.min_interval:
        return memory, []
    notices = []
    known: dict[str, Known] = {}
    for key, k in sorted(memory.known.items()):
        notice = _notice(key, k, config.remind, now)
        if notice is not None:
            notices.append(notice)
            k = replace(  # noqa: PLW2901
                k,
                told=k.grade,
                worst=k.grade,
                told_at=now.isoformat(),
                told_worst=severest(k.told_worst, k.grade) if k.grade else None,
                told_what=k.what,
            )
        if k.matters:
            known[key] = k
    if not notices:
        return replace(memory, known=known), []
    notices.sort(key=lambda notice: (-_RANK[notice.severity], notice.key))
    return (
        replace(
            memory,
            known=known,
            sent_at=now.isoformat(),
            outbox=_queued(memory.outbox, config, notices),
        ),
        notices,
    )


def _notice(key: str, k: Known, remind: timedelta | None, now: datetime) -> Notice | None:
    before = severest(k.told, k.worst)
    kind: Kind
    if k.grade is None and before is None:
        return None
    if k.grade is None:
        kind = "recovered"
    elif k.told is None:
        kind, before = "problem", None
    elif _RANK[k.grade] > _RANK[k.told]:
        kind, before = "worse", k.told
    elif k.grade != before:
        kind = "better"
    elif remind is not None and k.told_at and now - _time(k.told_at) >= remind:
        kind = "reminder"
    else:
        return None
    since = k.since if k.grade is not None or k.bad_since is None else k.bad_since
    lasted = max(0.0, (now - _time(since)).total_seconds())
    what = k.told_what or k.what if kind == "recovered" else k.what
    return Notice(key, kind, k.grade, before, what, k.detail, k.remedy, since, lasted, k.told_worst)


def _queued(
    outbox: dict[str, list[Waiting]], config: AlertsConfig, notices: Sequence[Notice]
) -> dict[str, list[Waiting]]:
    queued = {}
    for key, sink in zip(sink_keys(config), config.sinks, strict=True):
        wanted = [asdict(n) for n in notices if n.rank >= _RANK[sink.min_severity]]
        before = outbox.get(key, [])
        if isinstance(sink, WebhookSink) and sink.keeps_incidents:
            # Each by itself: one that isn't taken, or comes twice, is no other's matter. What is
            # newer of a problem takes the place of what waits.
            newer = {notice["key"] for notice in wanted}
            before = [w for w in before if {n["key"] for n in w.notices} - newer]
            queued[key] = [*before, *(Waiting([notice]) for notice in wanted)][-INCIDENTS:]
        else:
            queued[key] = [*before, *([Waiting(wanted)] if wanted else [])][-OUTBOX:]
    return queued


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)
