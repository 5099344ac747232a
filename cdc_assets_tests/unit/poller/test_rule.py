"""The rule of polls against a model: transactions begin, write, prepare and end at any time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc_assets.poller.bounds import Known, Running
from cdc_assets.poller.clock import MARGIN, SECOND, Clock

Begin = Callable[[Known, Running], int]


@dataclass
class Source:
    """A clock that each deed moves, or doesn't (ties); transactions, and the rows that are seen."""

    now: int = 0
    open: dict[str, tuple[int, list[int], bool]] = field(default_factory=dict)
    leaving: set[str] = field(default_factory=set)
    """Ids of sessions that have prepared their transaction, and hold them a moment longer."""
    visible: list[tuple[int, int]] = field(default_factory=list)
    ids: int = 0
    rows: int = 0

    def running(self) -> Running:
        sessions = {x for x, (_, _, prepared) in self.open.items() if not prepared}
        return Running(frozenset(sessions | self.leaving), frozenset(self.open.keys() - sessions))

    def begin(self) -> None:
        self.ids += 1
        self.open[str(self.ids)] = (self.now, [], False)

    def write(self, place: int) -> None:
        if sessions := [x for x, (*_, prepared) in self.open.items() if not prepared]:
            self.rows += 1
            self.open[sessions[place % len(sessions)]][1].append(self.rows)

    def prepare(self, place: int) -> None:
        if sessions := [x for x, (*_, prepared) in self.open.items() if not prepared]:
            session = sessions[place % len(sessions)]
            began, rows, _ = self.open.pop(session)
            self.leaving.add(session)
            self.ids += 1
            self.open[f"prepared {self.ids}"] = (began, rows, True)

    def leave(self) -> None:
        self.leaving.clear()

    def commit(self, place: int) -> None:
        if self.open:
            began, rows, _ = self.open.pop([*self.open][place % len(self.open)])
            self.visible += [(began, row) for row in rows]


@dataclass
class Poller:
    """Polls in two steps, between which anything may happen; ``forgets``: it begins anew."""

    source: Source
    begin: Begin
    known: Known = field(default_factory=lambda: Known(0))
    found: set[int] = field(default_factory=set)
    noted: tuple[int, Running] | None = None

    def note(self) -> None:
        self.noted = self.source.now, self.source.running()

    def read(self) -> None:
        if self.noted is None:
            return
        bound, running = self.noted
        at = self.begin(self.known, running)
        self.found |= {row for began, row in self.source.visible if began >= at}
        self.known, self.noted = self.known.then(running, bound), None

    def forget(self) -> None:
        self.known, self.noted = Known(self.known.safe), None


def _at_once(known: Known, _: Running) -> int:
    return known.last


def _before_the_last_read(known: Known, running: Running) -> int:
    return min([known.last, *(at for x, at in known.since.items() if x in running)])


DEEDS = st.tuples(
    st.sampled_from(
        ["begin", "write", "commit", "prepare", "leave", "tick", "note", "read", "forget"]
    ),
    st.integers(0, 5),
)


def play(deeds: list[tuple[str, int]], begin: Begin) -> bool:
    """Whether a last poll, when all transactions have ended, has found every row."""
    source = Source()
    poller = Poller(source, begin)
    for deed, place in deeds:
        if deed == "tick":
            source.now += 1
        elif deed in ("write", "commit", "prepare"):
            getattr(source, deed)(place)
        else:
            getattr(source if deed in ("begin", "leave") else poller, deed)()
    poller.read()
    while source.open:
        source.commit(0)
    poller.note()
    poller.read()
    return poller.found == {row for _, row in source.visible}


@given(st.lists(DEEDS, max_size=60))
@settings(max_examples=500, deadline=None)
def test_every_row_is_found(deeds: list[tuple[str, int]]) -> None:
    assert play(deeds, Known.begin)


def test_a_transaction_that_holds_both_of_its_ids_for_a_moment_is_found() -> None:
    """It began before the poll that is the last one when both are seen."""
    poll = [("note", 0), ("read", 0), ("tick", 0)]
    before = [("begin", 0), ("write", 0), ("tick", 0), *poll, *poll, ("prepare", 0)]
    assert play([*before, *poll, ("leave", 0), *poll, ("commit", 0)], Known.begin)


def test_those_that_are_left_may_have_been_prepared_meanwhile() -> None:
    noted = Running(frozenset({"1", "2"}), frozenset({"prepared 3"}))
    one = noted.left(Running(frozenset({"1", "9"}), frozenset({"prepared 3", "prepared 4"})))
    assert one == Running(frozenset({"1"}), frozenset({"prepared 3", "prepared 4"}))
    later = one.left(Running(frozenset(), frozenset({"prepared 4", "prepared 5"})))
    assert later == Running(frozenset(), frozenset({"prepared 4", "prepared 5"}))
    assert later.left(Running(frozenset({"7"}), frozenset({"prepared 8"}))) == Running()


@pytest.mark.parametrize("wrong", [_at_once, _before_the_last_read])
def test_other_rules_lose_rows(wrong: Begin) -> None:
    """The model is able to refute one: a transaction over two polls will do."""
    poll = [("note", 0), ("read", 0), ("tick", 0)]
    deeds = [("begin", 0), ("write", 0), ("tick", 0), *poll, *poll, ("commit", 0)]
    assert not play(deeds, wrong)
    assert play(deeds, Known.begin)


@pytest.mark.parametrize(
    ("then", "lowest"),
    [
        (Clock(1010 * SECOND, 10.0), None),
        (Clock(1009 * SECOND + SECOND // 2, 10.0), None),
        (Clock(910 * SECOND, 10.0), 900 * SECOND - MARGIN),
        (Clock(999 * SECOND + SECOND // 2, None), None),
        (Clock(910 * SECOND, None), -(2**63)),
    ],
)
def test_a_clock_that_was_set_back_is_noticed(then: Clock, lowest: int | None) -> None:
    assert Clock(1000 * SECOND, 0.0).lowest(then) == lowest
