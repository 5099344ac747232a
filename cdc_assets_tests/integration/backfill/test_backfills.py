"""Rows are read again while a table goes on: the lake ends with the source's, whatever happens."""

from __future__ import annotations

import random
import threading
from typing import Any

import psycopg
import pytest

from cdc_assets.backfill import carry_out as carrying
from cdc_assets.backfill import reader
from cdc_assets.backfill.horizons import Horizons, Proven
from cdc_assets.backfill.request import request
from cdc_assets.errors import ConfigurationError, TableProblem
from cdc_assets.log import backfills as record
from cdc_assets.operations.copying import mark_for_copy
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.snapshot import pace
from cdc_assets_tests.support.backfills import (
    SETUP,
    T,
    after_reading,
    backfilled,
    carried_out,
    damage,
    lose,
)
from cdc_assets_tests.support.lake import Lake, NewLake

pytestmark = pytest.mark.spark


def test_damaged_rows_are_healed_and_surplus_ones_stay_without_replace(source: Lake) -> None:
    source.flush()
    damage(
        source,
        "update lake.src.t set v = 'wrong' where id in (3, 4)",
        "delete from lake.src.t where id between 5 and 50",
        "insert into lake.src.t select 1000, 'only here', ''",
    )
    done = backfilled(source)
    assert (done.state, done.read, done.applied, done.superseded) == ("done", 300, 300, 0)
    assert len(source.rows(T)) == 301
    done = backfilled(source, replaces=True)
    assert (done.state, done.removed) == ("done", 1)
    assert source.equal(T)


def test_only_the_rows_of_a_condition_are_read(source: Lake) -> None:
    damage(source, "update lake.src.t set v = 'wrong' where id in (3, 200)")
    done = backfilled(source, where="id < 100 and v like 'v%'")
    assert (done.state, done.read, done.applied) == ("done", 99, 99)
    assert [row[0] for row in source.rows(T) if row[1] == "wrong"] == [200]


def test_a_condition_that_an_index_serves_reads_no_other_pages(
    new_lake: NewLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = "create table t (id int primary key, v text, n int);"
    setup += "insert into t select i, repeat('v', 200), i % 2 from generate_series(1, 20000) i;"
    with new_lake(setup + "analyze t;", {"name": "t", "chunk_pages": 16}) as source:
        source.pin()
        source.copy()
        monkeypatch.setattr("cdc_assets.backfill.planning._CHUNK_PAGES", 16)
        damage(source, "update lake.src.t set v = 'wrong' where id < 10")
        few = backfilled(source, where="id < 100")
        assert (few.state, few.chunks, few.read) == ("done", 1, 99)
        many = backfilled(source, where="n = 1")
        assert (many.state, many.read) == ("done", 10_000) and many.chunks > 10
        # One chunk may be all of a table whose condition no index serves: it is read in parts.
        monkeypatch.setattr("cdc_assets.backfill.planning._CHUNK_PAGES", 2**20)
        monkeypatch.setattr(carrying, "_TRIES", 1)
        read, parts = reader._Reader._read, list[int]()

        def counted(*about: Any) -> Any:
            parts.append(1)
            return read(*about)

        with monkeypatch.context() as patch:
            patch.setattr(reader._Reader, "_read", counted)
            large = backfilled(source, where="n = 0")
        assert (large.state, large.chunks, large.read) == ("done", 1, 10_000) and len(parts) > 1
        monkeypatch.setattr("cdc_assets.backfill.planning._CHUNK_PAGES", 16)
        # The planner may be wrong: then all pages are read, in short transactions.
        # A fast machine reads a thousand rows in the millisecond that is left: these take longer.
        slow = "id < 1000 and length(repeat(v, 500)) > 0"
        assert backfilled(source, where=slow).chunks == 1
        monkeypatch.setattr(reader, "_LONGER", 0.0005)
        wrong = backfilled(source, where=slow)
        assert (wrong.state, wrong.read) == ("done", 999) and wrong.chunks > 10
        assert source.equal(T)


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("nothing = 1", "Postgres refuses where"),
        ("id in (select 1)", "Postgres refuses where"),
        ("true) or (true", "a parenthesis or a quote has no other half"),
        ("now() > '2020-01-01'", "calls a function whose result may change"),
        ("public.theirs(id)", "calls what isn't Postgres's own"),
        ("id = 1; drop table t", "without ; and comments"),
    ],
)
def test_a_condition_is_checked_when_it_is_asked_for_and_when_it_is_run(
    source: Lake, where: str, said: str
) -> None:
    body = "immutable language sql as 'select true'"
    source.execute(f"create function theirs(int) returns bool {body}")
    with pytest.raises(ConfigurationError, match=said):  # which the command line ends with 2 for
        request(source.pipeline, T, where)
    forged = record.request(source.pipeline.store, T, where, replaces=False, by="somebody")
    with pytest.raises(TableProblem, match=said):
        carried_out(source, forged.number)
    ended = record.backfill(source.pipeline.store, forged.number)
    assert ended.state == "failed" and said in str(ended.reason)


def test_what_cannot_be_backfilled_is_refused(new_lake: NewLake) -> None:
    setup = "create table h (v text); create table a (id int primary key, v text);"
    setup += "create table b (id int primary key); alter table h replica identity full;"
    tables = ({"name": "h", "mode": "mirror"}, {"name": "a", "mode": "append"}, "b")
    with new_lake(setup, *tables) as source:
        with pytest.raises(TableProblem, match="its copy isn't complete"):
            request(source.pipeline, TableId("public", "a"))
        source.pin()
        source.copy()
        with pytest.raises(TableProblem, match="it has no key"):
            request(source.pipeline, TableId("public", "h"))
        with pytest.raises(TableProblem, match="its rows are its history"):
            request(source.pipeline, TableId("public", "a"))
        with pytest.raises(ConfigurationError, match="where and replace exclude each other"):
            request(source.pipeline, TableId("public", "b"), "id = 1", replaces=True)


# --- changes meanwhile ---


def test_what_changes_between_reading_and_applying_is_left_to_the_stream(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(
        source,
        "update lake.src.t set v = 'wrong', big = 'wrong' where id < 10",
    )

    def change() -> None:
        source.execute("update t set v = 'later' where id = 1; delete from t where id = 2")
        source.execute("delete from t where id = 3; insert into t values (3, 'again', 'again')")
        source.execute("update t set id = 500 where id = 4; update t set v = 'w' where id = 5")
        source.execute(
            "update t set id = -id where id in (6, 7); update t set id = 13 + id where id < 0"
        )
        source.catch_up(T)
        source.execute("update t set v = 'comes later' where id = 8; delete from t where id = 9")

    after_reading(monkeypatch, change)
    done = backfilled(source)
    assert done.superseded in (7, 9)  # what comes later may be applied before it, too
    source.catch_up(T)
    assert source.equal(T)


def test_a_truncate_between_reading_and_applying_leaves_all_to_the_stream(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change() -> None:
        source.execute("truncate t; insert into t values (1, 'new', 'new')")
        source.catch_up(T)

    after_reading(monkeypatch, change)
    done = backfilled(source)
    assert (done.applied, done.superseded) == (0, 300)
    source.catch_up(T)
    assert source.equal(T)


@pytest.mark.parametrize(
    "statement",
    [
        "alter table t add w int default 7",
        "alter table t drop v",
        "alter table t rename v to w",
        "alter table t alter id type bigint",
        "vacuum full t",
        "truncate t",
    ],
)
def test_a_table_that_is_altered_meanwhile_is_read_again(
    source: Lake, monkeypatch: pytest.MonkeyPatch, statement: str
) -> None:
    """Once while rows are read, once between that and applying them."""
    damage(source, "delete from lake.src.t where id < 10")
    todo, add = [statement], reader.refuse_changed

    def altered(*about: Any) -> None:
        while todo and "vacuum" not in statement:
            source.execute("set lock_timeout = '100ms'")
            with pytest.raises(psycopg.errors.LockNotAvailable):
                source.execute(todo.pop())  # the rows' transaction holds the table's lock
            source.execute("reset lock_timeout")
        add(*about)

    monkeypatch.setattr(reader, "refuse_changed", altered)
    after_reading(monkeypatch, lambda: source.execute(statement))
    monkeypatch.setattr(carrying, "_AGAIN_SECONDS", 0.1)
    assert backfilled(source).state == "done"
    source.execute("insert into t (id) values (1000)")
    source.catch_up(T)
    names = "id, v, big" if "drop" not in statement else "id, big"
    there = source.session.table("lake.src.t").select(*_names(statement)).collect()
    expected = source.execute(f"select {', '.join(_names(statement))} from t")
    assert sorted(map(tuple, there)) == sorted(expected), names


def _names(statement: str) -> list[str]:
    return ["id", "big"] if "drop v" in statement or "rename" in statement else ["id", "v"]


def test_a_table_that_is_copied_anew_ends_its_backfill(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change() -> None:
        mark_for_copy(source.pipeline, [T])
        source.pin()
        source.copy()

    after_reading(monkeypatch, change)
    monkeypatch.setattr(carrying, "_AGAIN_SECONDS", 0.1)
    with pytest.raises(TableProblem, match="it was copied anew since the backfill began"):
        backfilled(source)
    source.catch_up(T)
    assert source.equal(T)


def test_a_commit_that_hangs_while_its_row_is_read_is_not_undone(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose(monkeypatch, source, source.pipeline.source_dsn)
    assert source.equal(T)


def test_with_the_low_watermark_for_a_horizon_it_would_be_undone(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def watermark(self: Horizons, connection: psycopg.Connection[Any]) -> Proven:
        row = connection.execute("select pg_current_wal_flush_lsn()::text").fetchone()
        assert row is not None
        return Proven(Lsn.parse(row[0]), self._offset)

    monkeypatch.setattr(Horizons, "latest", watermark)
    lose(monkeypatch, source, source.pipeline.source_dsn)
    assert [row[:2] for row in source.rows(T) if row[0] == 7] == [(7, "v7")]


@pytest.mark.parametrize("mode", ["mirror", "soft_delete"])
@pytest.mark.parametrize("seed", [1, 2])
def test_random_changes_meanwhile_in_many_small_parts(
    new_lake: NewLake, monkeypatch: pytest.MonkeyPatch, mode: str, seed: int
) -> None:
    monkeypatch.setattr(pace, "_FIRST", 2)
    monkeypatch.setattr("cdc_assets.backfill.planning._CHUNK_PAGES", 1)
    monkeypatch.setattr(reader, "PART_BYTES", 4_000)
    monkeypatch.setattr(carrying, "_GROUP_BYTES", 20_000)
    setup = SETUP.replace("repeat('long ', 500)", "repeat('long ', 200)")
    setup = setup.replace("storage external", "storage main")
    with new_lake(setup, {"name": "t", "mode": mode, "chunk_pages": 4}) as source:
        source.pin()
        source.copy()
        damage(
            source,
            "update lake.src.t set v = 'wrong' where id % 3 = 0",
            "delete from lake.src.t where id % 7 = 0",
        )
        stop, dsn = threading.Event(), source.pipeline.source_dsn
        writer = threading.Thread(target=_write, args=(dsn, stop, seed))
        writer.start()
        try:
            done = backfilled(source, replaces=True)
        finally:
            stop.set()
            writer.join()
        assert done.state == "done" and done.read > 200
        source.catch_up(T)
        kept = "where _deleted_at is null" if mode == "soft_delete" else ""
        there = source.session.sql(f"select id, v, big from lake.src.t {kept}").collect()
        assert sorted(map(tuple, there)) == sorted(source.execute("select * from t"))


def _write(dsn: str, stop: threading.Event, seed: int) -> None:
    """Random changes of random keys; a changed row has all of its columns changed."""
    chosen = random.Random(seed)
    with psycopg.connect(dsn, autocommit=True) as writer:
        number = 0
        while not stop.is_set():
            number += 1
            key, other = chosen.randint(1, 320), chosen.randint(1, 320)
            text, big = f"w{number}", f"{number} " * 100
            match chosen.randint(0, 3):
                case 0:
                    writer.execute("delete from t where id = %s", (key,))
                case 1:
                    writer.execute(
                        "insert into t values (%s, %s, %s) on conflict (id)"
                        " do update set v = excluded.v, big = excluded.big",
                        (key, text, big),
                    )
                case 2:
                    writer.execute("update t set v = %s, big = %s where id = %s", (text, big, key))
                case _:
                    writer.execute(
                        "update t set id = %(b)s, v = %(v)s where id = %(a)s"
                        " and not exists (select from t where id = %(b)s)",
                        {"a": key, "b": other, "v": text},
                    )
            stop.wait(0.002)
