"""The rule of backfills against a model in which a commit and its visibility are separate steps.

A transaction changes one key. Its commit puts it into the log; only later is it visible, and only
then may another transaction change the key, as row locks have it. A reader sees what is visible.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field

import pyarrow as pa
import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from cdc_assets.backfill.rule import changed_keys, counts
from cdc_assets.log.batch import Window, selected
from cdc_assets.postgres.lsn import Lsn

KEYS = ("a", "b", "c")
State = dict[str, str | None]


@dataclass
class Source:
    """A server, its log, and a lake, some of whose rows are wrong."""

    visible: State = field(default_factory=lambda: dict.fromkeys(KEYS, "0"))
    running: dict[str, tuple[str | None, int | None]] = field(default_factory=dict)
    """By key: the value that is written, and the place of its commit in the log."""
    log: list[tuple[str, str | None]] = field(default_factory=list)
    values: int = 0

    @property
    def now(self) -> int:
        return len(self.log)

    def step(self, key: str, deletes: bool) -> None:
        """The next thing that happens to a key: it is written, committed, or visible."""
        if key not in self.running:
            self.values += 1
            self.running[key] = (None if deletes else str(self.values), None)
        elif self.running[key][1] is None:
            value = self.running[key][0]
            self.running[key] = (value, self.now)
            self.log.append((key, value))
        else:
            self.visible[key] = self.running.pop(key)[0]


@dataclass(frozen=True)
class Story:
    """What happens before each thing that a backfill does; ``wrong``: rows of the lake."""

    before: list[tuple[str, bool]]
    until_proven: list[tuple[str, bool]]
    until_read: list[tuple[str, bool]]
    until_applied: list[tuple[str, bool]]
    after: list[tuple[str, bool]]
    wrong: frozenset[str]


steps = st.lists(st.tuples(st.sampled_from(KEYS), st.booleans()), max_size=8)
stories = st.builds(Story, steps, steps, steps, steps, steps, st.frozensets(st.sampled_from(KEYS)))


def happen(source: Source, some: list[tuple[str, bool]]) -> None:
    for key, deletes in some:
        source.step(key, deletes)


def ends_right(story: Story, *, proven: bool) -> bool:
    """Whether the lake is the source at the end; ``proven``: whether the horizon is awaited.

    The lake was damaged before the backfill began. It is compared with what was read at any moment
    after that, which may be long before the rows that differed then are written.
    """
    source = Source()
    happen(source, story.before)
    horizon = source.now
    running = dict(source.running)
    happen(source, story.until_proven)
    if proven:
        for key, written in running.items():  # the observation waits for these
            while source.running.get(key, (None, None))[0] == written[0] and key in source.running:
                source.step(key, False)
    happen(source, story.until_read)
    low = horizon if proven else source.now
    read, high = dict(source.visible), source.now
    happen(source, story.until_applied)
    choose = random.Random(source.values)
    applied = choose.randint(high, source.now)
    compared = choose.randint(0, applied)
    damaged = choose.randint(0, min(horizon, compared))
    lake: State = dict.fromkeys(KEYS, "0")
    lake |= dict[str, str | None](source.log[:damaged])
    lake |= dict.fromkeys(story.wrong, "wrong")
    lake |= dict[str, str | None](source.log[damaged:compared])
    snapshot = dict(lake)
    lake |= dict[str, str | None](source.log[compared:applied])
    changed = changed_since(source, low, applied)
    rows = [key for key in KEYS if read[key] is not None]
    for key, good in zip(rows, counts([(key,) for key in rows], changed), strict=True):
        if good and snapshot[key] != read[key]:
            lake[key] = read[key]
    happen(source, story.after)
    lake |= dict[str, str | None](source.log[applied:])
    committed = dict.fromkeys(KEYS, "0") | dict(source.log)
    there = {key for key in KEYS if read[key] is not None}
    # A row that only the lake has isn't looked for here.
    return all(lake[key] == committed[key] for key in there | (set(KEYS) - story.wrong))


def changed_since(source: Source, low: int, applied: int) -> frozenset[tuple[str | None, ...]]:
    """As the log's files have it: each commit's LSN is ten times its place, and ten."""
    table = pa.table(
        {
            "_commit_lsn": pa.array([10 * n + 10 for n in range(source.now)], pa.int64()),
            "_op": pa.array(
                ["D" if value is None else "U" for _, value in source.log], pa.string()
            ),
            "_data": pa.array([json.dumps({"k": key}) for key, _ in source.log], pa.string()),
        }
    )
    _, mask = selected(table, 0, Window(0, Lsn(10 * low + 10), None, applied))
    found = changed_keys(table.filter(mask), ["k"])
    assert found is not None
    return found


@settings(max_examples=2_000, deadline=None)
@given(stories)
def test_a_backfill_ends_with_the_source_whatever_happens_meanwhile(story: Story) -> None:
    assert ends_right(story, proven=True)


def test_a_low_watermark_alone_loses_a_commit_that_is_not_visible_yet() -> None:
    """DBLog's rule: whatever committed before the chunk was read would be in it."""
    try:
        found = find(stories, lambda story: not ends_right(story, proven=False))
    except NoSuchExample:
        pytest.fail("the rule of the low watermark can't be refuted by this model")
    assert ends_right(found, proven=True)


def test_a_truncate_leaves_all_to_the_stream() -> None:
    events = pa.table({"_op": ["U", "T"], "_data": ['{"k":"a"}', "{}"]})
    assert changed_keys(events, ["k"]) is None
    assert counts([("a",), ("b",)], None).tolist() == [False, False]
