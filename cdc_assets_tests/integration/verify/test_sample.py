"""The sampled comparison: it finds each kind of difference within one round, and stops nobody."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import dagster as dg
import pytest

from cdc_assets.dagster.build import build_defs
from cdc_assets.dagster.checks.sample import NAME, check_sample
from cdc_assets.dagster.names import all_tables
from cdc_assets.errors import TableProblem
from cdc_assets.log.locks import write_lock
from cdc_assets.log.verified import (
    KeysSeen,
    compared_at_rest,
    keys_seen,
    remember_compared,
    remember_keys,
)
from cdc_assets.materializer.drain import drain
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.verify import sample as sampling
from cdc_assets.verify.key_names import hashed, salt
from cdc_assets.verify.keys import look
from cdc_assets.verify.point import await_log
from cdc_assets.verify.sample import Sampled, sample
from cdc_assets_tests.support.flusher import flushing
from cdc_assets_tests.support.lake import Lake, NewLake, unhashed
from cdc_assets_tests.support.waiting import wait_for

pytestmark = pytest.mark.spark

T, C, P, H, E = (TableId("public", name) for name in "tcphe")
SETUP = """
create table t (id int primary key, v text, n numeric(8,2)) with (fillfactor = 10);
insert into t select i, 'v' || i, i from generate_series(1, 3000) i;
create table c (a text collate "C", at timestamptz, d numeric(6,2), v text, primary key (a, at, d));
insert into c select 'a"' || i, '2024-01-01'::timestamptz + i * interval '1.5 s', i + 0.5, 'x'
  from generate_series(1, 100) i;
create table p (id int primary key, v text) partition by range (id);
create table p1 partition of p for values from (0) to (500);
create table p2 partition of p for values from (500) to (5000);
insert into p select i, 'x' from generate_series(1, 1000) i;
create table h (a int);
insert into h values (1), (1);
create table e (kind text, at timestamptz);
insert into e select 'abc', '2024-01-01'::timestamptz + i * interval '1 s'
  from generate_series(1, 30) i;
"""


@pytest.fixture
def source(copied_lake: NewLake) -> Iterator[Lake]:
    tables = ["t", {"name": "c", "mode": "append"}, {"name": "p", "mode": "soft_delete"}]
    tables += [{"name": name, "mode": "append"} for name in "he"]
    settings = {"verify": {"sample_rows": 2000, "show_keys": True}}
    with copied_lake(SETUP, *tables, **settings) as opened:
        yield opened


@contextmanager
def streaming(source: Lake) -> Iterator[None]:
    with flushing(source.config) as progress:
        wait_for(lambda: progress.state == "streaming")
        yield


def rounds(source: Lake, table: TableId) -> list[Sampled]:
    """Samples until all of the table has been compared."""
    found = []
    while True:
        found.append(sample(source.pipeline, source.session, table, 2000))
        assert found[-1].skipped is None
        if found[-1].begin + found[-1].share >= 1:
            return found


def test_a_round_compares_all_of_a_table_under_live_changes(source: Lake) -> None:
    with streaming(source):
        source.execute("update t set v = 'changed' where id % 7 = 0; delete from t where id < 20")
        source.execute("update c set v = 'y' where d < 20; delete from c where d > 90")
        source.execute("update p set id = id + 2000 where id < 100; delete from p where id > 2050")
        found = {table: rounds(source, table) for table in (T, C, P, H)}
        assert [one.differing for many in found.values() for one in many] == [0] * (2 + 1 + 1 + 1)
        # Each row was in one of the samples: neighbouring pages, and a part of the keys.
        assert sum(one.rows for one in found[T]) == 2981
        assert sum(one.looked_up for one in found[T]) == 2981
        assert all(one.looked_up < 2500 for one in found[T])
        assert (found[C][0].rows, found[C][0].looked_up) == (89, 89)
        assert (found[P][0].rows, found[P][0].looked_up) == (951, 951)
        assert (found[H][0].rows, found[H][0].looked_up) == (2, 0)


def test_a_table_without_a_key_is_compared_as_far_as_its_rows_tell(source: Lake) -> None:
    def some() -> Sampled:
        return sample(source.pipeline, source.session, H, 1)

    with streaming(source):
        source.session.sql("insert into lake.src.h (a) values (7)")
        [whole] = rounds(source, H)
        seven, one = (hashed(salt(source.pipeline.store), H, f'{{"a":"{a}"}}') for a in (7, 1))
        assert whole.keys == (f"{seven} (source 0, lake 1)",), "rows are shown by no setting"
        assert (some().share, some().differing) == (1 / 3, 0)
        source.session.sql("delete from lake.src.h where a = 1")
        remember_compared(source.pipeline.store, H, 0.0)
        found = some()
        assert (found.differing, found.share) == (2, 1.0)
        assert found.keys == (f"{one} (source 2, lake 0)", f"{seven} (source 0, lake 1)")


def test_merges_go_on_and_what_they_changed_meanwhile_is_left_out(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Pipeline.open(source.config)

    changes = {
        T: "update t set v = 'later' where id <= 3; delete from t where id = 4;"
        " update t set id = 7000 where id = 5",
        C: "update c set v = 'later' where d = 1.5; update c set d = 9.75 where d = 2.5",
        H: "insert into h values (9)",
        # What tells rows apart may have values that the lake has no form for.
        E: "insert into e values ('abc', now()), ('abc', 'infinity')",
    }

    def merged_meanwhile(*arguments: Any) -> None:
        table = arguments[1]
        source.execute(changes[table])
        await_log(*arguments)
        wait_for(lambda: bool(other.store.entries(table, 0)))
        assert drain(other, source.session, table), "nobody else has its lock"

    with streaming(source):
        monkeypatch.setattr(sampling, "await_log", merged_meanwhile)
        try:
            found = {
                table: sample(source.pipeline, source.session, table, 5000) for table in changes
            }
        finally:
            other.close()
    assert [(one.skipped, one.differing) for one in found.values()] == [(None, 0)] * 4
    assert [one.moved for one in found.values()] == [6, 3, 1, 2]
    assert (found[T].rows, found[E].rows) == (3000 - 5, 30)


def test_every_kind_of_difference_is_found_within_a_round(source: Lake) -> None:
    with streaming(source):
        for statement in (
            "delete from lake.src.t where id = 1",
            "update lake.src.t set v = 'wrong', n = n + 1 where id = 1500",
            "insert into lake.src.t select * from lake.src.t where id = 2999",
            "insert into lake.src.t values (-5, 'surplus', 0)",
            "insert into lake.src.c (a, at, d, v, _op) values ('z', now(), 1, 'surplus', 'I')",
            "update lake.src.p set _deleted_at = current_timestamp() where id = 700",
        ):
            source.session.sql(statement)
        found = rounds(source, T)
        keys = " ".join(key for one in found for key in one.keys)
        assert sum(one.differing for one in found) == 4
        assert '{"id":"1"} (source 1, lake 0)' in keys
        assert '{"id":"1500"} (source 1, lake 1: v, n)' in keys
        assert '{"id":"2999"} (source 1, lake 2)' in keys
        assert '{"id":"-5"} (only in the lake)' in keys
        assert {column for one in found for column in one.columns} == {"v", "n"}
        [c], [p] = rounds(source, C), rounds(source, P)
        assert (c.differing, p.differing) == (1, 1)
        assert "(only in the lake)" in c.keys[0]
        assert unhashed(p.keys) == ['{"id":"700"} (source 1, lake 0)']


def test_what_differed_is_told_until_all_of_the_table_is_equal(source: Lake) -> None:
    names = {names.table: names for names in all_tables(source.config)}

    def told() -> tuple[bool, int]:
        found = sample(source.pipeline, source.session, T, 2000)
        assert found.skipped is None
        result = check_sample(found, names[T], source.pipeline.store.server_now())
        assert result.passed or result.severity is dg.AssetCheckSeverity.ERROR
        return result.passed, found.differing

    epoch = source.lake_table(T).row.epoch
    with streaming(source):
        source.session.sql("update lake.src.t set v = 'wrong' where id = 5")
        assert [told() for _ in range(2)] == [(False, 1), (False, 0)]
        source.session.sql("update lake.src.t set v = 'v5' where id = 5")
        assert [told() for _ in range(3)] == [(False, 0), (True, 0), (True, 0)]
        remember_compared(source.pipeline.store, T, 0.5, differs=epoch)
        assert told() == (False, 0)
        remember_compared(source.pipeline.store, T)  # by verify, which reads all of it
        assert told() == (True, 0)
        remember_compared(source.pipeline.store, T, 0.5, differs=epoch - 1)
        assert told() == (True, 0), "it was another copy"
        remember_compared(source.pipeline.store, T, 0.0, differs=epoch)  # all of it in one part
        assert sample(source.pipeline, source.session, T, 5000).differed_at is None


def test_keys_are_counted_without_rows_that_deletion_vectors_hide(source: Lake) -> None:
    def duplicated(seen: KeysSeen | None) -> tuple[int, KeysSeen]:
        loaded = source.lake_table(T).load()
        assert loaded is not None
        found = look(loaded, ["id"], seen, source.pipeline.store.server_now())
        assert found is not None
        remember_keys(source.pipeline.store, T, found.seen)
        assert keys_seen(source.pipeline.store, T) == found.seen
        return found.duplicated, found.seen

    source.execute("update t set v = 'again' where id % 9 = 0")
    source.flush()
    source.drain(T)
    count, seen = duplicated(None)
    assert count == 0
    source.session.sql("insert into lake.src.t select * from lake.src.t where id in (7, 9)")
    count, seen = duplicated(seen)
    assert count == 2
    source.session.sql("delete from lake.src.t where id in (7, 9)")
    assert duplicated(seen)[0] == 0


def test_the_check_tells_and_the_writer_is_free_again(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {names.table: names for names in all_tables(source.config)}
    job = build_defs(source.config).resolve_job_def("sample_src_tables")

    def evaluations(instance: dg.DagsterInstance) -> dict[str, dg.AssetCheckEvaluation]:
        result = job.execute_in_process(instance=instance)
        assert result.success
        return {
            evaluation.asset_key.path[-1]: evaluation
            for evaluation in result.get_asset_check_evaluations()
            if evaluation.check_name == NAME
        }

    with dg.DagsterInstance.ephemeral() as instance:
        patience = sampling.PATIENCE_SECONDS
        monkeypatch.setattr(sampling, "PATIENCE_SECONDS", 1.0)
        found = evaluations(instance)  # nobody streams
        assert (found["t"].passed, found["t"].severity) == (False, dg.AssetCheckSeverity.WARN)
        assert "isn't level" in str(found["t"].description)
        missed = sample(source.pipeline, source.session, T, 2000)
        assert missed.since is not None
        late = check_sample(missed, names[T], missed.since + timedelta(days=1))
        assert (late.passed, late.severity) == (False, dg.AssetCheckSeverity.ERROR)
        with streaming(source):
            monkeypatch.setattr(sampling, "PATIENCE_SECONDS", patience)
            source.session.sql("update lake.src.t set v = 'wrong' where id = 5")
            found = evaluations(instance)
            assert not found["t"].passed
            assert found["t"].severity is dg.AssetCheckSeverity.ERROR
            said = {key: value.value for key, value in found["t"].metadata.items()}
            told = r'#[0-9a-f]{12} \{"id":"5"\} \(source 1, lake 1: v\)'
            assert re.fullmatch(told, str(said["keys that differ"]))
            assert (said["columns that differ"], said["share of the table"]) == ("v", 0.666667)
            assert found["c"].passed and found["p"].passed and found["h"].passed
            assert source.pipeline.store.try_lock(write_lock(names[T].table))
            source.pipeline.store.unlock(write_lock(names[T].table))
            source.execute("insert into t values (9000, 'more', 1)")
            source.flush()
            with pytest.raises(TableProblem, match="somebody else changed rows"):
                source.drain(T)
    slots = "select slot_name from pg_replication_slots where database = current_database()"
    assert source.execute(slots) == [("cdc_src",)]


def merged(source: Lake, statement: str) -> None:
    """``statement``, of table t, in the lake."""
    store = source.pipeline.store
    source.execute(statement)
    wait_for(lambda: any(b.table == T and b.rows for b in store.backlogs()))
    source.drain(T)


def test_a_table_that_changed_in_the_midst_of_a_round_does_not_rest(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rests() -> bool:
        return T in compared_at_rest(source.pipeline.store, timedelta(hours=12))

    with streaming(source):
        rounds(source, T)
        assert rests()
        first = sample(source.pipeline, source.session, T, 2000)
        assert first.share < 1
        merged(source, "update t set v = 'changed' where id = 1")  # of the part that is compared
        rounds(source, T)
        assert not rests()
        rounds(source, T)
        assert rests()
        compare = sampling._compare

        def merged_meanwhile(*given: Any) -> Sampled:
            found = compare(*given)
            merged(source, "update t set v = 'later' where id = 1")
            return found

        with monkeypatch.context() as patched:
            patched.setattr(sampling, "_compare", merged_meanwhile)
            assert sample(source.pipeline, source.session, T, 5000).share == 1
        assert not rests()
