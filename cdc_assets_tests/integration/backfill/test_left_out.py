"""Values that changes left out (unchanged TOAST) are healed, whatever happens to the backfill."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from cdc_assets.backfill import apply as applying
from cdc_assets.backfill import carry_out as carrying
from cdc_assets.backfill import round as rounds
from cdc_assets.backfill.request import request
from cdc_assets.backfill.round import Round
from cdc_assets.errors import Fenced
from cdc_assets.log import backfills as record
from cdc_assets.operations.backfilling import wish
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support.backfills import T, after_reading, backfilled, carried_out, damage
from cdc_assets_tests.support.lake import Lake, NewLake

pytestmark = pytest.mark.spark


def changes(monkeypatch: pytest.MonkeyPatch, source: Lake, statement: str) -> None:
    """After rows were read, and is applied before they are: these are left to the stream."""

    def change() -> None:
        source.execute(statement)
        source.catch_up(T)

    after_reading(monkeypatch, change)


@pytest.fixture
def damaged(source: Lake, monkeypatch: pytest.MonkeyPatch) -> Lake:
    """The stream has no value of ``big`` that is newer than the row that was read."""
    monkeypatch.setattr(carrying, "_AGAIN_SECONDS", 0.1)
    damage(source, "update lake.src.t set big = 'wrong' where id = 5")
    changes(monkeypatch, source, "update t set v = 'n' where id = 5")
    return source


def ended(source: Lake, number: int) -> str | None:
    done = carried_out(source, number)
    assert done.state == "done"
    source.catch_up(T)
    assert source.equal(T)
    return done.reason


def paused_before_it_heals(monkeypatch: pytest.MonkeyPatch, source: Lake) -> int:
    """The number of a backfill that is paused once all its chunks are applied."""
    number = request(source.pipeline, T).number

    def paused(_: Round, write: Any, _proven: Any) -> None:
        wish(source.pipeline, "pause", number)
        write(None)

    with monkeypatch.context() as patched:
        patched.setattr(Round, "healed", paused)
        patched.setattr(carrying, "_LOOK_SECONDS", 0.0)
        assert carried_out(source, number).state == "paused"
    return number


def test_though_it_was_paused_once_all_chunks_were_applied(
    damaged: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = paused_before_it_heals(monkeypatch, damaged)
    assert record.planned(damaged.pipeline.store, number) == []
    wish(damaged.pipeline, "resume", number)
    assert ended(damaged, number) is None


@pytest.mark.parametrize("error", [Fenced("somebody else"), psycopg.OperationalError("gone")])
def test_though_it_was_tried_again_and_others_merged_the_change(
    damaged: Lake, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    number, calls = request(damaged.pipeline, T).number, list[int]()
    applied = vars(rounds)["apply"]  # which has the change come

    def apply(*about: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:  # the first is the one after which the change comes
            damaged.execute("update t set v = 'm' where id = 5")
            damaged.catch_up(T)
            raise error
        return applied(*about)

    monkeypatch.setattr(rounds, "apply", apply)
    assert ended(damaged, number) is None


def test_though_its_log_was_removed_while_it_was_paused(
    damaged: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = paused_before_it_heals(monkeypatch, damaged)
    damaged.pipeline.store.connection.execute(
        "delete from log_index where table_name = %s", (str(T),)
    )
    wish(damaged.pipeline, "resume", number)
    assert ended(damaged, number) is None


def test_of_more_keys_than_are_looked_up_together(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "KEYS", 7)
    damage(source, "update lake.src.t set big = 'wrong' where id <= 50")
    changes(monkeypatch, source, "update t set v = 'n' where id <= 50")
    assert backfilled(source).state == "done"
    source.catch_up(T)
    assert source.equal(T)


def test_rows_that_change_whenever_they_are_read_are_told(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    applied, calls = applying.apply, list[int]()

    def apply(*about: Any) -> Any:
        calls.append(1)
        source.execute(f"update t set v = 'v{len(calls)}' where id = 5")
        return applied(*about)

    monkeypatch.setattr(rounds, "apply", apply)
    done = backfilled(source)
    assert done.state == "done"
    assert str(done.reason).startswith("1 rows changed whenever they were read again")


def test_though_the_table_was_altered_since_it_began(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carrying, "_AGAIN_SECONDS", 0.1)
    damage(source, "update lake.src.t set big = 'wrong' where id < 10")

    def change() -> None:
        source.execute("update t set v = 'n' where id = 5")
        source.execute("alter table t rename v to w; update t set w = 'm' where id = 6")
        source.catch_up(T)

    after_reading(monkeypatch, change)
    assert ended(source, request(source.pipeline, T).number) is None


def test_though_a_transaction_is_open_since_before_the_change(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No horizon is proven above the change until it ends: its row would be left to the stream."""
    monkeypatch.setattr(carrying, "_TOLD_SECONDS", 0.2)
    damage(source, "update lake.src.t set big = 'wrong' where id = 5")
    number, said = request(source.pipeline, T).number, list[str]()
    with psycopg.connect(source.pipeline.source_dsn) as stranger:

        def change() -> None:
            stranger.execute("create table strange ()")
            source.execute("update t set v = 'n' where id = 5")
            source.catch_up(T)

        after_reading(monkeypatch, change)

        def told(what: str) -> None:
            said.append(what)
            if what.startswith("it waits for transactions that have written"):
                stranger.rollback()

        done = carried_out(source, number, on_progress=told)
    assert (done.state, done.reason, done.differed) == ("done", None, 1), said
    source.catch_up(T)
    assert source.equal(T)


def test_though_the_row_changes_again_while_the_log_is_applied_to_the_end(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(source, "update lake.src.t set big = 'wrong' where id = 5")
    applied, calls = applying.apply, list[int]()

    def apply(*about: Any) -> Any:
        calls.append(1)
        if len(calls) <= 2:  # of the chunk, and then of nothing
            source.execute(f"update t set v = 'v{len(calls)}' where id = 5")
            source.catch_up(T)
        return applied(*about)

    monkeypatch.setattr(rounds, "apply", apply)
    assert ended(source, request(source.pipeline, T).number) is None


def test_though_the_change_is_applied_before_the_chunks_are_planned(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And after the first horizon, by which its row is left to the stream."""
    damage(source, "update lake.src.t set big = 'wrong' where id = 5")
    planned, todo = carrying._Backfilling._planned, [1]

    def change(*about: Any) -> Any:
        while todo:
            todo.pop()
            source.execute("update t set v = 'n' where id = 5")
            source.catch_up(T)
        return planned(*about)

    monkeypatch.setattr(carrying._Backfilling, "_planned", change)
    assert ended(source, request(source.pipeline, T).number) is None


def test_a_row_that_has_another_text_of_its_key_by_now_is_known_by_that(
    new_lake: NewLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = TableId("public", "n")
    setup = "create table n (id numeric primary key, v text, big text);"
    setup += "alter table n alter big set storage external;"
    setup += "insert into n values (5.0, 'v', repeat('long ', 500))"
    with new_lake(setup, "n") as source:
        source.pin()
        source.copy()
        source.catch_up(table)
        applied, calls = applying.apply, list[int]()

        def apply(*about: Any) -> Any:
            calls.append(1)
            match len(calls):
                case 1:
                    source.execute("update n set v = 'left out' where id = 5")
                    source.catch_up(table)
                    source.execute("update n set id = 5.00, big = 'new'")
                case 3:  # the row is read by 5.0
                    source.execute("update n set v = 'last'")
                    source.catch_up(table)
            return applied(*about)

        monkeypatch.setattr(rounds, "apply", apply)
        assert backfilled(source, table).state == "done"
        assert len(calls) >= 3
        source.catch_up(table)
        assert source.rows(table) == [("5.00", "last", "new")]
