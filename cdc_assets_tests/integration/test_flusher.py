"""The flusher on a real server: the invariants it keeps, what it survives, how it ends."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import psycopg
import pytest

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.errors import ReplicationProblem
from cdc_assets.flusher.flusher import run
from cdc_assets.flusher.wire import Received, Stream
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.slots import current_lsn
from cdc_assets_tests import pgoutput_reference as reference
from cdc_assets_tests.flusher_support import (
    Bench,
    bench,
    ended,
    flushing,
    start_flusher,
    wait_for,
)


@pytest.fixture
def source(
    postgres: EmbeddedPostgres, request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Bench]:
    dsn = postgres.dsn()
    assert dsn is not None
    name = "f_" + request.node.name.removeprefix("test_").lower()[:30].rstrip("_")
    with bench(dsn, name, tmp_path) as made:
        yield made


def simple(source: Bench) -> None:
    source.execute("create table t (id int primary key, v text)")


# --- what is staged ---


def test_real_frames_equal_the_plain_decoder(source: Bench) -> None:
    source.execute("""
        create table keyed (id int primary key, v text, doc text);
        alter table keyed alter doc set storage external;
        create table full_ (a int, b text, doc text, primary key (a, b));
        alter table full_ replica identity full;
        alter table full_ alter doc set storage external;
        create table keyless (a text, doc text);
        alter table keyless replica identity full;
        create table "My ""T"".x" ("Id\\" int primary key, "naïve, 'q'" jsonb);
        create table nothing (); alter table nothing replica identity full;
    """)
    tables = ("keyed", "full_", "keyless", '"My ""T"".x"', "nothing")
    config = source.config(*(f"public.{t}" for t in tables))
    source.flush(config)
    source.execute("select pg_create_logical_replication_slot('beside', 'pgoutput')")
    doc = "repeat(md5('x'), 200)"
    source.execute(f"""
        insert into keyed select g, 'v' || g, {doc} from generate_series(1, 50) g;
        insert into full_ select g, 'k', {doc} from generate_series(1, 50) g;
        insert into keyless values ('a', {doc}), (null, null), ('', {doc});
        insert into nothing default values;
    """)
    source.execute("update keyed set v = null where id < 10")
    source.execute("update keyed set id = id + 1000 where id < 20")
    source.execute("update full_ set b = 'moved' where a < 5; update full_ set a = a where a < 9")
    source.execute("update keyless set a = 'b' where a = 'a'; delete from keyless where a is null")
    source.execute("delete from keyed where id = 30; delete from full_ where a = 30")
    source.execute(r"""insert into "My ""T"".x" values (1, '{"a\\": "\u0001 \n é 🎉"}')""")
    source.execute(
        "begin; insert into keyed values (1, 'first'); savepoint s;"
        " insert into keyed values (2, 'gone'); rollback to s;"
        " insert into keyed values (3, 'third'); commit"
    )
    source.execute("truncate keyed, full_; insert into keyed values (1, 'x', 'y')")
    source.execute("alter table keyed add more int default 7; update keyed set v = 'z'")
    source.execute("alter table keyed drop doc; insert into keyed values (9, e'\\b\\t\\\\', 1)")
    source.flush(config)

    messages = source.execute(
        "select lsn::text, data from pg_logical_slot_get_binary_changes('beside', null, null,"
        " 'proto_version', '1', 'publication_names', %s)",
        f"cdc_{source.name}",
    )
    oids = {t: source.execute("select %s::regclass::oid::int", t)[0][0] for t in tables}
    keys = {"keyed": ("id",), "full_": ("a", "b"), '"My ""T"".x"': ("Id\\",)}
    plain = reference.Reference(
        {oid: reference.Spec(keys.get(table, ())) for table, oid in oids.items()}
    )
    for lsn, data in messages:
        plain.feed(b"w" + struct.pack(">QQq", int(Lsn.parse(lsn)), 0, 0) + data)
    for table, oid in oids.items():
        expected = [
            (r.op, r.lsn, r.commit_lsn, r.at, r.xid, r.unchanged, r.data)
            for r in plain.rows
            if r.oid == oid
        ]
        found = [
            (r.op, r.lsn, r.commit_lsn, r.at, r.xid, r.unchanged, r.data)
            for r in source.log(f"public.{table}")
        ]
        assert found == expected
    keyed = source.log("public.keyed")
    assert {"first", "third"} < {r.data.get("v") for r in keyed}
    assert "gone" not in {r.data.get("v") for r in keyed}
    assert any("" in r.data for r in keyed)
    assert any(r.op == "T" for r in keyed)


# --- the invariants ---


def test_invariant_1_ack_after_register(source: Bench) -> None:
    simple(source)
    config = source.config("public.t", flush_interval="100ms")
    source.flush(config)
    with flushing(config), psycopg.connect(source.dsn) as blocker:
        blocker.execute("lock table _pg2iceberg.log_index in exclusive mode")
        source.execute("insert into t select g, 'x' from generate_series(1, 1000) g")
        written = current_lsn(source.connection)
        # Staged, and the registration hangs: this is when an early acknowledgement would show.
        wait_for(
            lambda: source.execute(
                "select 1 from pg_locks where not granted"
                " and relation = '_pg2iceberg.log_index'::regclass"
            )
        )
        for _ in range(15):
            assert source.confirmed() <= source.flushed() < written
            time.sleep(0.1)
        blocker.rollback()
        wait_for(lambda: source.flushed() >= written)
        wait_for(lambda: source.confirmed() >= written)
        assert source.confirmed() <= source.flushed()
    assert len(source.log("public.t")) == 1000


def test_invariant_2_all_or_nothing(source: Bench) -> None:
    simple(source)
    config = source.config("public.t")
    source.flush(config)
    before = source.flushed()
    source.execute("alter table _pg2iceberg.log_index add constraint no check (false)")
    source.execute("insert into t select g, 'x' from generate_series(1, 10) g")
    with pytest.raises(psycopg.errors.CheckViolation):
        source.flush(config)
    assert source.flushed() == before
    assert source.execute("select * from _pg2iceberg.log_seq") == []
    assert len(list(source.folder.rglob("*.parquet"))) == 1  # an orphan
    source.execute("alter table _pg2iceberg.log_index drop constraint no")
    source.flush(config)
    assert [r.data["id"] for r in source.log("public.t")] == [str(i) for i in range(1, 11)]


def test_invariant_3_commit_order_in_whole_transactions(source: Bench) -> None:
    simple(source)
    config = source.config("public.t", flush_bytes="1MB", flush_interval="50ms")
    source.flush(config)
    with flushing(config), psycopg.connect(source.dsn) as large:
        source.execute("insert into t values (-1, 'early')")
        large.execute(
            "insert into t select g, repeat('large', 20) from generate_series(1, 60000) g"
        )
        source.execute("insert into t values (-2, 'meanwhile')")
        large.execute(
            "insert into t select g, repeat('large', 20) from generate_series(60001, 120000) g"
        )
        time.sleep(0.5)
        assert len(source.log("public.t")) <= 2
        large.commit()
        source.execute("insert into t values (-3, 'late')")
        written = current_lsn(source.connection)
        seen = set[int]()
        while source.flushed() < written:
            seen.add(sum(b - a for a, b, _ in source.entries("public.t")))
            time.sleep(0.01)
    # Never a part of the large one: 0, 1 or 2 rows before it, then all of it.
    assert not [count for count in seen if 2 < count < 120_002], seen
    rows = source.log("public.t")
    assert [r.data["v"] for r in rows[:2]] == ["early", "meanwhile"]
    assert [r.data["id"] for r in rows[2:-1]] == [str(i) for i in range(1, 120_001)]
    assert rows[-1].data["v"] == "late"
    assert [r.commit_lsn for r in rows] == sorted(r.commit_lsn for r in rows)
    assert len(source.entries("public.t")) > 4  # it was staged in parts


def test_a_change_of_what_is_registered_is_seen_without_reading_it(source: Bench) -> None:
    simple(source)
    config = source.config("public.t")
    source.flush(config)
    another = (
        "insert into _pg2iceberg.tables (source, table_name, oid, state, key_columns, columns)"
        " select %s, %s, oid, state, key_columns, columns from _pg2iceberg.tables"
    )
    with Pipeline.open(config) as pipeline:
        revision = pipeline.store.revision
        found = [revision()]
        assert revision() == found[0]
        source.execute("update _pg2iceberg.tables set reason = 'x'")
        found.append(revision())
        source.execute("update _pg2iceberg.tables set reason = null")
        found.append(revision())
        source.execute(another, source.name, "public.other")
        found.append(revision())
        source.execute("delete from _pg2iceberg.tables where table_name = 'public.t'")
        found.append(revision())
        source.execute(another, "another source", "public.t")
        assert revision() == found[-1]
    assert len(set(found)) == len(found)


def test_of_one_table_no_other_is_read(source: Bench) -> None:
    """With 500 tables of 30 columns all of them take 0.1 s, and a merge asks more than once."""
    simple(source)
    config = source.config("public.t")
    source.flush(config)
    source.execute(
        "insert into _pg2iceberg.tables (source, table_name, oid, state, key_columns, columns)"
        " select source, 'public.other', oid, state, key_columns, '\"unreadable\"' from"
        " _pg2iceberg.tables"
    )
    with Pipeline.open(config) as pipeline:
        row = pipeline.store.table(TableId("public", "t"))
        assert row is not None and [column.name for column in row.columns] == ["id", "v"]
        assert pipeline.store.table(TableId("public", "none")) is None


# --- the slot ---


def test_until_ends_under_constant_writes(source: Bench) -> None:
    simple(source)
    config = source.config("public.t")
    source.flush(config)
    stop, count = threading.Event(), Counter[str]()

    def write() -> None:
        with psycopg.connect(source.dsn, autocommit=True) as writer:
            while not stop.is_set():
                count["rows"] += 1
                writer.execute("insert into t values (%s, 'x')", (count["rows"],))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        time.sleep(0.5)
        written, until = count["rows"], current_lsn(source.connection)
        began = time.monotonic()
        result = run(config, until=until)
        assert time.monotonic() - began < 20
    finally:
        stop.set()
        writer.join()
    assert result.ended_by == "until"
    assert result.flushed is not None
    assert result.flushed >= until
    assert source.confirmed() >= until
    assert len(source.log("public.t")) >= written


def test_the_last_acknowledgement_arrives_though_more_is_being_sent(source: Bench) -> None:
    simple(source)
    config = source.config("public.t")
    flushed = source.flush(config).flushed
    assert flushed is not None
    ends = []
    for first in range(0, 20_000, 1000):
        source.execute(
            "insert into t select %s + g, repeat('x', 1000) from generate_series(1, 1000) g", first
        )
        ends.append(current_lsn(source.connection))
    stream = Stream.start(source.dsn, config.name, config.slot, [config.publication], flushed)
    wait_for(lambda: stream.receive(1).frames)  # the server is sending, and goes on to
    stream.close(ends[0])
    assert source.confirmed() >= ends[0]


def test_a_waiting_table_is_pinned_while_the_others_flow(source: Bench) -> None:
    simple(source)
    source.execute("create table u (id int primary key)")
    config = source.config("public.t", "public.u", flush_interval="50ms")
    source.flush(config)
    source.execute(
        "update _pg2iceberg.tables set state = 'waiting', snapshot_lsn = null"
        " where table_name = 'public.u'"
    )
    with flushing(config), psycopg.connect(source.dsn) as old:
        old.execute("select pg_current_xact_id()")  # the pin has to wait for this one
        time.sleep(4)
        source.execute("insert into t values (1, 'x'); insert into u values (1)")
        wait_for(lambda: len(source.log("public.t")) == 1)
        waiting = "select 1 from _pg2iceberg.tables where state = 'waiting'"
        assert source.execute(waiting)
        old.rollback()
        wait_for(lambda: not source.execute(waiting))
        source.execute("insert into u values (2)")
        wait_for(lambda: len(source.log("public.u")) == 2)


# --- ends and new beginnings ---


def test_a_decoder_that_fails_ends_the_run_with_its_words(
    source: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    simple(source)
    config = source.config("public.t")
    source.flush(config)
    source.execute("insert into t values (1, 'x')")
    real = Stream.receive

    def broken(self: Stream, limit_bytes: int) -> Received:
        received = real(self, limit_bytes)
        received.frames = [memoryview(b"what is this?") for _ in received.frames]
        return received

    with monkeypatch.context() as patch:
        patch.setattr(Stream, "receive", broken)
        with pytest.raises(ReplicationProblem, match=r"the decoder failed: .*broken"):
            source.flush(config)
    source.flush(config)
    assert len(source.log("public.t")) == 1


def test_a_killed_decoder_ends_the_run(source: Bench) -> None:
    simple(source)
    config = source.config("public.t")
    source.flush(config)

    def decoders() -> list[psutil.Process]:
        found = []
        for child in psutil.Process(os.getpid()).children():
            with suppress(psutil.NoSuchProcess):  # or a zombie: its parent hasn't seen its end yet
                if "cdc_assets.flusher.decoder.main" in child.cmdline():
                    found.append(child)
        return found

    def kill_it() -> None:
        with flushing(config):
            wait_for(decoders)
            for decoder in decoders():
                decoder.kill()
            wait_for(lambda: not decoders())
            time.sleep(0.5)

    with pytest.raises(ReplicationProblem, match="decoder process"):
        kill_it()


@pytest.mark.parametrize("lost", ["flusher", "log"])
def test_lost_connections_are_made_again(source: Bench, lost: str) -> None:
    simple(source)
    config = source.config("public.t", flush_interval="50ms")
    source.flush(config)
    with flushing(config) as progress:
        wait_for(lambda: progress.state == "streaming")  # before that it is no loss
        for number in range(1, 61):
            source.execute(
                "insert into t select %s * 100 + g, 'x' from generate_series(1, 50) g", number
            )
            if number in (20, 40):
                wait_for(lambda: source.terminate(lost))
            time.sleep(0.05)
        written = current_lsn(source.connection)
        wait_for(lambda: source.flushed() >= written)
    ids = [int(r.data["id"] or 0) for r in source.log("public.t")]
    assert ids == [n * 100 + g for n in range(1, 61) for g in range(1, 51)]


@pytest.mark.parametrize("how", ["SIGTERM", "stdin"])
def test_an_orderly_stop_leaves_nothing_behind(source: Bench, how: str) -> None:
    simple(source)
    source.flush(source.config("public.t"))
    child = start_flusher(source.config_file("public.t", flush_interval="1h"))
    wait_for(lambda: source.terminate("nobody") or len(psutil.Process(child.pid).children()) == 1)
    source.execute("insert into t select g, 'x' from generate_series(1, 1000) g")
    time.sleep(1)
    children = psutil.Process(child.pid).children()
    if how == "SIGTERM":
        child.terminate()
    else:
        assert child.stdin is not None
        child.stdin.close()
    assert child.wait(30) == 0
    assert all(map(ended, children))
    assert len(source.log("public.t")) == 1000  # what was complete is in the log
    assert source.confirmed() == source.flushed()


def test_a_killed_flusher_leaves_no_child(source: Bench) -> None:
    simple(source)
    child = start_flusher(source.config_file("public.t"))
    wait_for(lambda: psutil.Process(child.pid).children())
    (decoder,) = psutil.Process(child.pid).children()
    child.kill()
    child.wait()
    wait_for(lambda: ended(decoder), 10)


def test_a_server_restart(tmp_path: Path) -> None:
    postgres = EmbeddedPostgres(tmp_path / "postgres", settings={"fsync": "off"})
    dsn = postgres.start()
    try:
        with bench(dsn, "restarted", tmp_path) as source:
            simple(source)
            config = source.config("public.t", flush_interval="50ms")
            source.flush(config)
            with flushing(config):
                source.execute("insert into t values (1, 'before')")
                wait_for(lambda: len(source.log("public.t")) == 1)
                postgres.stop()
                time.sleep(1)
                postgres.start()
                source.connection = psycopg.connect(source.dsn, autocommit=True)
                source.execute("insert into t values (2, 'after')")
                wait_for(lambda: len(source.log("public.t")) == 2)
            source.connection.close()
    finally:
        postgres.stop()


# --- what stays in the source ---


def _without(source: Bench, *excluded: str) -> SourceConfig:
    settings = source.settings("public.t", flush_interval="20ms")
    settings["tables"] = [{"name": "public.t", "columns": {"exclude": list(excluded)}}]
    return parse_config(settings, "test")


def test_an_excluded_column_stays_in_the_source_under_any_name(source: Bench) -> None:
    source.execute("create table t (id int primary key, secret text, v text)")
    config = _without(source, "secret", "later")
    source.flush(config)
    source.execute("insert into t values (1, 'S3CRET', 'a')")
    written = current_lsn(source.connection)
    with flushing(config):  # one session sees it all
        wait_for(lambda: source.flushed() >= written)
        source.execute("alter table t rename secret to open; alter table t add w text")
        source.execute("insert into t values (2, 'S3CRET', 'b', 'new')")
        source.execute("alter table t rename v to secret; alter table t rename open to v")
        source.execute("update t set v = 'S3CRET too', w = 'x' where id = 2")
        source.execute("alter table t rename secret to u; alter table t add later text")
        source.execute("insert into t values (3, 'S3CRET', 'c', 'w', 'S3CRET')")
        written = current_lsn(source.connection)
        wait_for(lambda: source.flushed() >= written)
    source.execute("alter table t rename later to soon")  # and another one begins here
    source.execute("insert into t values (4, 'S3CRET', 'd', 'w', 'S3CRET')")
    source.flush(config)
    rows = source.log("public.t")
    assert [row.data for row in rows] == [
        {"id": "1", "v": "a"},
        {"id": "2", "v": "b", "w": "new"},
        {"id": "2", "w": "x"},
        {"id": "3", "w": "w"},  # u was called secret for a while
        {"id": "4", "w": "w"},
    ]
    assert source.parked() == {}


def test_what_may_be_an_excluded_column_parks_its_table(source: Bench) -> None:
    source.execute("create table t (id int primary key, secret text, v text)")
    config = _without(source, "secret")
    source.flush(config)
    source.execute("alter table t drop secret; insert into t values (1, 'fine')")
    source.execute("alter table t rename v to w; alter table t add x text")
    source.execute("insert into t values (2, 'fine', 'x')")
    source.flush(config)
    assert [row.data for row in source.log("public.t")] == [
        {"id": "1"},
        {"id": "2", "w": "fine", "x": "x"},
    ]
    assert "v may be what columns.exclude names" in source.parked()["public.t"]
    assert "resync" in source.parked()["public.t"]


def test_a_relation_that_looks_as_before_may_be_another_one(source: Bench) -> None:
    source.execute("create table t (id int primary key, v text, secret text)")
    config = _without(source, "secret")
    source.flush(config)
    with flushing(config):
        source.execute("insert into t values (1, 'a', 'S3CRET')")
        wait_for(lambda: len(source.log("public.t")) == 1)
        source.execute(
            "begin; alter table t drop v; alter table t rename secret to v;"
            " alter table t add secret text; update t set v = 'S3CRET too'; commit"
        )
        wait_for(lambda: len(source.log("public.t")) == 2)
    assert [row.data for row in source.log("public.t")] == [{"id": "1", "v": "a"}, {"id": "1"}]
    assert "v may be what columns.exclude names" in source.parked()["public.t"]
