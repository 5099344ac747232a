"""A backfill ends however much of its table's log came since it was paused."""

from __future__ import annotations

from typing import Any

import pytest

from cdc_assets.backfill import apply as applying
from cdc_assets.backfill import carry_out as carrying
from cdc_assets.backfill.apply import Done
from cdc_assets.backfill.request import request
from cdc_assets.backfill.round import Round
from cdc_assets.operations.backfilling import wish
from cdc_assets_tests.support.backfills import T, after_reading, carried_out, damage
from cdc_assets_tests.support.lake import Lake

pytestmark = pytest.mark.spark


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrying, "_AGAIN_SECONDS", 0.1)
    monkeypatch.setattr(carrying, "_TRIES", 3)
    monkeypatch.setattr(applying, "_MOST_BYTES", 20_000)


def paused(monkeypatch: pytest.MonkeyPatch, source: Lake) -> int:
    """The number of a backfill that is paused before it reads anything, its plan made."""
    number = request(source.pipeline, T).number

    def pause(self: Any, *_: object) -> None:
        wish(source.pipeline, "pause", number)
        self._look()

    with monkeypatch.context() as patched:
        patched.setattr(carrying._Backfilling, "_rows", pause)
        patched.setattr(carrying, "_LOOK_SECONDS", 0.0)
        assert carried_out(source, number).state == "paused"
    wish(source.pipeline, "resume", number)
    return number


def steps(monkeypatch: pytest.MonkeyPatch) -> list[Done]:
    """What each look at the log found, as far as it applied something."""
    found, applied = list[Done](), Round.apply

    def apply(self: Round, *about: Any) -> Done:
        found.append(applied(self, *about))
        return found[-1]

    monkeypatch.setattr(Round, "apply", apply)
    return found


def test_whole_rows_of_before_a_horizon_are_not_counted(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(source, "update lake.src.t set big = 'wrong' where id = 5")
    number = paused(monkeypatch, source)
    for turn in range(3):
        source.execute(f"update t set v = 'n{turn}', big = big || {turn} where id between 6 and 30")
        source.catch_up(T)  # 60 kB
    found = steps(monkeypatch)
    done = carried_out(source, number)
    assert (done.state, done.reason, done.applied, done.superseded) == ("done", None, 300, 0)
    assert len({one.searched for one in found}) >= 3
    assert source.equal(T)


def test_what_changes_left_out_is_healed_in_steps(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are left to the stream, for changes of before all that a step searches."""
    monkeypatch.setattr(applying, "_MOST_BYTES", 1)
    damage(source, "update lake.src.t set big = 'wrong' where id in (5, 6, 7)")
    number = paused(monkeypatch, source)
    found = steps(monkeypatch)
    for key in (5, 6, 7):
        source.execute(f"update t set v = 'n' where id = {key}")
        source.catch_up(T)
    done = carried_out(source, number)
    assert (done.state, done.reason) == ("done", None)
    assert [len(one.partial) for one in found if one.partial] == [1, 1, 1]
    assert source.equal(T)


def test_what_changed_too_much_since_it_was_read_is_read_again(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(source, "update lake.src.t set big = 'wrong' where id = 5")

    def change() -> None:
        source.execute("update t set v = 'n', big = big || 'n' where id between 5 and 30")
        source.catch_up(T)

    after_reading(monkeypatch, change)
    said = list[str]()
    done = carried_out(source, request(source.pipeline, T).number, on_progress=said.append)
    assert (done.state, done.reason) == ("done", None)
    assert sum("it changed too much since it was read" in text for text in said) == 1
    assert source.equal(T)
