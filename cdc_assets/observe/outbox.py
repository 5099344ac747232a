"""Delivery of waiting messages: each is tried at every look until its sink takes it.

A message may come twice, and isn't lost: while a sink is away, its newest ones wait. But a message
that the sink never takes must not keep the others from it. Such a message is known by the sink's
refusal, or by the sink taking another one in the same look; it is tried some minutes longer, beside
the others, and then left out. A sink that takes no messages is a condition like any other, so the
other sinks report it before that.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from cdc_assets.config.alerts import SinkConfig, sink_keys
from cdc_assets.config.source import SourceConfig
from cdc_assets.observe.condition import COMMAND, WARN, Condition
from cdc_assets.observe.notices import Memory, Notice, Waiting
from cdc_assets.observe.sinks import TRANSIENT, away, refused, said, send

# The sensor that delivers has a minute for everything; a message under way may take 20 s more.
_BUDGET_SECONDS = 15.0
# Looks come every 15 seconds. After so many tries a look may begin with another message.
_STUCK = 8
# After so many refusals a message is left out.
_REFUSALS = 20


def deliver(config: SourceConfig, memory: Memory) -> tuple[Memory, list[str]]:
    """Try the waiting messages; those that aren't taken go on waiting, and are reported.

    Neither a sink that hangs nor a message that can't be made holds up the others.
    """
    keys, sinks = sink_keys(config.alerts), config.alerts.sinks

    def empty(key: str, sink: SinkConfig) -> tuple[list[Waiting], list[str]]:
        return _emptied(config, key, sink, memory.outbox.get(key, []))

    with ThreadPoolExecutor(max(1, len(sinks))) as pool:
        done = list(pool.map(empty, keys, sinks))
    outbox = {key: left for key, (left, _) in zip(keys, done, strict=True) if left}
    return replace(memory, outbox=outbox), [problem for _, told in done for problem in told]


def _emptied(
    config: SourceConfig, key: str, sink: SinkConfig, waiting: Sequence[Waiting]
) -> tuple[list[Waiting], list[str]]:
    """A sink's messages that are left after one look, and the problems to report."""
    deadline = time.monotonic() + _BUDGET_SECONDS
    left, problems, failed, taken = dict(enumerate(waiting)), list[str](), list[int](), False
    todo = _order(waiting) if waiting else []
    while todo and time.monotonic() <= deadline:
        one = waiting[place := todo.pop(0)]
        try:
            send(config, sink, [Notice(**notice) for notice in one.notices])
        except TRANSIENT as error:
            its_fault = refused(error)
            left[place] = replace(
                one, tries=one.tries + 1, refused=one.refused + its_fault, said=said(error)
            )
            if not its_fault:
                failed.append(place)
                if taken or one.tries < _STUCK or len(failed) > 1 or away(sink, error):
                    break  # the sink is away: another message would show no more
        except Exception as error:  # noqa: BLE001 - tried again it would fail again
            del left[place]
            problems.append(f"{key} can't be given a message, which is left out: {said(error)}")
        else:
            del left[place]
            taken = True
            todo.sort()  # the sink is there: the rest is sent in order
    if taken:
        for place in failed:
            left[place] = replace(left[place], refused=left[place].refused + 1)
    for place in [place for place, one in left.items() if one.refused >= _REFUSALS]:
        problems.append(f"{key} refused a message too often, which is left out: {left[place].said}")
        del left[place]
    if why := next((one.said for one in left.values() if one.tries), ""):
        problems.append(f"{key} took no message: {why}; {len(left)} wait")
    return list(left.values()), problems


def _order(waiting: Sequence[Waiting]) -> list[int]:
    """The oldest first; once it is stuck it comes last, and looks begin with the others in turn."""
    first, *others = range(len(waiting))
    if waiting[0].tries < _STUCK or not others:
        return [first, *others]
    turn = sum(one.tries for one in waiting) % len(others)
    return [*others[turn:], *others[:turn], first]


def undelivered(memory: Memory) -> list[Condition]:
    """A condition for each sink that has a message which it hasn't taken for some looks."""
    found = []
    for key, waiting in memory.outbox.items():
        stuck = [one for one in waiting if one.tries >= _STUCK]
        if stuck:
            found.append(
                Condition(
                    f"sink:{key}",
                    f"the sink {key} of alerts doesn't take messages",
                    f"{len(waiting)} wait, tried {stuck[0].tries} times: {stuck[0].said}",
                    f"`{COMMAND} alert-test` tries it. A message that the sink itself refuses is"
                    " left out some minutes later.",
                    WARN,
                )
            )
    return found
