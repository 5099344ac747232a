"""A group that begins late, from a snapshot, and replays the log to what the source has."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from cdc_assets.consumers import Begin, Changes, Event, Schema, SnapshotRows, Stream, Truncate
from cdc_assets.maintenance.run import Maintained, maintain
from cdc_assets.operations.copying import mark_for_copy
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support.followers import Replica, ends, read
from cdc_assets_tests.support.lake import Lake, NewLake

pytestmark = pytest.mark.spark

T, S = "public.t", "public.s"
SETUP = """
create table t (id int primary key, v text, big text, n numeric(12,2), at timestamptz, l text[]);
alter table t alter big set storage external;
insert into t select i, 'copied', repeat(chr(97 + i % 20), 3000), i / 3.0, now(), array['a', null]
  from generate_series(1, 300) i;
create table s (a int, b text, v double precision, primary key (a, b));
insert into s select i, 'b', i / 7.0 from generate_series(1, 50) i;
"""
GROUPS: list[dict[str, Any]] = [
    {"name": "search"},
    {"name": "later", "tables": ["t"], "start": "now"},
]


@pytest.fixture
def source(copied_lake: NewLake) -> Iterator[Lake]:
    keep = {"keep_snapshots": {"count": 1, "age": "0s"}}
    with copied_lake(SETUP, "t", "s", consumers=GROUPS, maintenance=keep) as opened:
        yield opened


def test_a_late_group_replays_to_what_the_source_has(source: Lake) -> None:
    source.execute("update t set v = 'before' where id <= 100; delete from t where id > 290")
    source.catch_up()
    source.execute("update t set v = 'not merged' where id <= 10")  # staged, above the snapshot
    source.flush()
    replica = read(source, Replica())
    assert ends(replica) == 2
    begun = [event for event in replica.of(Begin) if isinstance(event, Begin)]
    assert {(e.table, e.key, e.snapshot) for e in begun} == {
        (T, ("id",), True),
        (S, ("a", "b"), True),
    }
    assert replica.equal(source, T)
    assert replica.equal(source, S)
    kinds = [type(event) for event in replica.seen if event.table == T]
    assert kinds.index(SnapshotRows) < kinds.index(Changes)

    source.execute("update t set v = 'only v' where id <= 20")  # big isn't sent
    source.execute("update t set id = -id where id between 5 and 8")  # nor here
    source.execute("update s set b = 'c' where a < 5; delete from s where a > 40")
    source.execute("insert into t values (1000, null, '', 'NaN', 'infinity', '{}')")
    source.flush()
    changed = read(source, Replica(replica.rows, replica.keys, replica.columns))
    assert ends(changed) == 0
    changes = [row for e in changed.of(Changes) for row in rows(e) if e.table == T]
    assert any(row["_unchanged"] == ["big"] for row in changes)
    assert any(row["_old_key"] == {"id": 5} and row["id"] == -5 for row in changes)
    assert changed.equal(source, T, "id, v, big, l")
    assert changed.equal(source, S)
    odd = next(row for row in changed.rows[T].values() if row["id"] == 1000)
    assert (odd["n"], odd["at"]) == (None, None)  # as in the lake: columns.unrepresentable


def rows(event: Event) -> list[dict[str, Any]]:
    assert isinstance(event, Changes)
    found: list[dict[str, Any]] = event.rows.to_pylist()
    return found


def test_under_traffic_with_truncates_and_other_columns(source: Lake) -> None:
    replica, stop = Replica(), threading.Event()

    def write() -> None:
        with psycopg.connect(source.pipeline.source_dsn, autocommit=True) as client:
            for i in range(100_000):
                if stop.is_set():
                    return
                client.execute(
                    "insert into t (id, v, big) values (%s, 'w', repeat('x', 3000))"
                    " on conflict (id) do update set v = t.v || 'w'",
                    (i % 400,),
                )
                client.execute("update t set id = id + 1000 * %s where id = %s", (i, i % 37))
                client.execute("delete from t where id = %s", (i * 7 % 400,))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for step in range(5):
            if step == 2:
                source.execute("truncate s; insert into s values (1, 'after', 0)")
            if step == 3:
                source.execute("alter table t add w int; update t set w = 1 where id < 200")
            if step == 4:
                source.execute("alter table t drop n")
            source.flush()
            if step % 2:
                source.drain_all()
            read(source, replica)
    finally:
        stop.set()
        writer.join()
    source.execute("insert into t (id) values (-1)")
    source.catch_up()
    read(source, replica)
    assert replica.equal(source, T)
    assert replica.equal(source, S)
    assert set(replica.columns[T]) == {"id", "v", "big", "at", "l", "w"}
    assert len(replica.of(Truncate)) == 1
    assert ends(replica) == 2


def test_an_added_column_s_values_in_older_rows_come_with_another_snapshot(source: Lake) -> None:
    replica = read(source, Replica())
    source.execute("alter table t add w int default 7; update t set v = 'x' where id = 1")
    source.flush()
    wanted = list[str]()

    def again(stream: Stream, event: Event) -> None:
        if isinstance(event, Schema) and "w" not in wanted and "w" in event.schema.names:
            wanted.append("w")
            stream.begin_again(event.table)
        else:
            event.commit()

    read(source, replica, on_event=again)
    assert wanted == []  # its types are known once the lake table has followed
    source.drain_all()
    read(source, replica, on_event=again)
    assert wanted == ["w"]
    assert ends(replica) == 3
    assert replica.equal(source, T)


def test_maintenance_keeps_the_files_of_a_snapshot_that_is_read(source: Lake) -> None:
    source.execute("insert into t select i, 'more' from generate_series(301, 400) i")
    source.catch_up()
    done = list[Maintained]()

    def care(_stream: Stream, event: Event) -> None:
        if isinstance(event, SnapshotRows) and event.table == T and not done:
            source.execute("update t set v = 'later'")
            source.catch_up()
            for _ in range(2):  # what was compacted goes with the second one
                done.extend(maintain(source.pipeline, lambda: source.session, [TableId.parse(T)]))
        event.commit()

    replica = read(source, Replica(), on_event=care)
    assert [one.problem for one in done] == [None, None]
    assert [one.expired.snapshots for one in done] == [0, 0]
    assert ends(replica) == len(replica.of(Begin)) == 2
    assert len(replica.rows[T]) == 400
    assert read(source, replica).equal(source, T)
    [after] = maintain(source.pipeline, lambda: source.session, [TableId.parse(T)])
    assert after.expired.snapshots > 0


def test_a_copy_made_anew_is_told(source: Lake) -> None:
    replica = read(source, Replica())
    source.execute("update t set v = 'y' where id < 50")
    mark_for_copy(source.pipeline, [TableId("public", "t")])
    source.flush()
    assert read(source, replica).seen
    assert ends(replica) == 2  # while it waits nothing of it is given
    source.pin()
    source.copy()
    source.catch_up()
    source.execute("update t set v = 'z' where id < 5")
    source.flush()
    read(source, replica)
    [*_, last] = [event for event in replica.of(Begin) if isinstance(event, Begin)]
    assert (last.table, last.why) == (T, "the table was copied anew")
    assert replica.equal(source, T)


def test_a_group_that_begins_now_gets_what_changes_from_now_on(source: Lake) -> None:
    source.execute("update t set v = 'before' where id = 1")
    source.flush()
    replica = read(source, Replica(), "later")
    [begin] = replica.seen
    assert isinstance(begin, Begin)
    assert (begin.table, begin.snapshot) == (T, False)
    source.execute("update t set v = 'after', big = '' where id = 2")
    source.flush()
    read(source, replica, "later")
    assert [(row["id"], row["v"]) for row in replica.rows[T].values()] == [(2, "after")]
