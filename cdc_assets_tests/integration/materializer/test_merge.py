"""The merge: whatever happens at the source, the lake ends with its rows (invariants 7 and 8).

The changes are real: a random workload runs against the source, the flusher stages what the server
sends, the materializer merges it.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyiceberg.manifest import ManifestContent
from pyiceberg.typedef import Identifier

from cdc_assets.lake.catalog.parsed import ParsedOnce
from cdc_assets.lake.drafts.tables import TableDraft
from cdc_assets.lake.spark.session import open_session, summary
from cdc_assets.materializer import drain as drain_module
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support.lake import Lake, NewLake

pytestmark = pytest.mark.spark

M, H, F = TableId("public", "m"), TableId("public", "h"), TableId("public", "f")
SETUP = """
create table m (id int, k2 text, v text, doc text, n numeric(10,2), primary key (id, k2));
alter table m alter doc set storage external;
insert into m select i, 'a', 'v' || i, repeat('doc' || i, 1000), i from generate_series(1, 20) i;
create table h (a int, b text);
alter table h replica identity full;
insert into h select i % 3, 'x' from generate_series(1, 10) i;
create table f (id int primary key, v text, doc text);
alter table f alter doc set storage external;
alter table f replica identity full;
insert into f select i, 'v', repeat('full' || i, 1000) from generate_series(1, 10) i;
"""


@pytest.fixture(params=[3], ids="format-v{}".format)
def source(request: pytest.FixtureRequest, copied_lake: NewLake) -> Iterator[Lake]:
    settings = {"lake": {"format_version": request.param}}
    with copied_lake(SETUP, "m", "h", "f", **settings) as opened:
        yield opened


def _random_statement(rnd: random.Random) -> str:
    """One statement; statements that hit nothing or collide are part of the game."""
    a, b = rnd.randrange(1, 30), rnd.randrange(1, 30)
    k, other = rnd.choice("ab"), rnd.choice("ab")
    value = rnd.randrange(10**6)
    return rnd.choice(
        [
            (
                f"insert into m values ({a}, '{k}', 'i{value}', repeat('n{value}', 1000), 1.5)"
                " on conflict do nothing"
            ),
            f"insert into m values ({a}, '{k}', 'i{value}', null, null) on conflict do nothing",
            f"update m set v = 'u{value}' where id = {a}",
            (
                f"update m set v = 'u{value}', doc = repeat('d{value}', 1000)"
                f" where id = {a} and k2 = '{k}'"
            ),
            f"delete from m where id = {a} and k2 = '{k}'",
            # key changes: the document stays where it is, under the old key
            (
                f"update m set id = {b}, k2 = '{other}' where id = {a} and k2 = '{k}'"
                f" and not exists (select from m where id = {b} and k2 = '{other}')"
            ),
            (
                f"update m set id = {b}, v = null, n = null where id = {a} and k2 = '{k}'"
                f" and not exists (select from m where id = {b} and k2 = '{k}')"
            ),
            f"insert into h values ({a % 3}, '{k}')",
            f"delete from h where ctid = (select ctid from h where a = {a % 3} limit 1)",
            f"update h set b = '{other}' where ctid = (select ctid from h limit 1)",
            f"update f set v = 'u{value}' where id = {a}",
            f"update f set id = {b} where id = {a} and not exists (select from f where id = {b})",
        ]
    )


@pytest.mark.parametrize(
    ("source", "seed", "folded"),
    [(3, 1, "by Spark"), (3, 2, "here"), (2, 2, "by Spark")],
    indirect=["source", "folded"],
)
@pytest.mark.usefixtures("folded")
def test_invariant_8_random_changes_end_with_the_rows_of_the_source(
    source: Lake, seed: int
) -> None:
    rnd = random.Random(seed)
    for round_ in range(3):
        for _ in range(25):
            statements = "; ".join(_random_statement(rnd) for _ in range(rnd.randrange(1, 4)))
            source.execute(f"begin; {statements}; {rnd.choice(['commit', 'commit', 'rollback'])}")
        if round_ == 1:
            source.execute("truncate h")
            if seed == 2:
                source.execute("truncate m; insert into m values (1, 'a', 'after', 'doc', 0)")
        source.catch_up()
        for table in (M, H, F):
            expected = sorted(source.execute(f"select * from {table}"), key=repr)
            assert source.rows(table) == expected, (seed, round_, table)


def test_invariant_8_insert_then_partial_update_in_one_batch(source: Lake) -> None:
    source.execute("insert into m values (100, 'z', 'first', repeat('long', 1000), 1)")
    source.execute("update m set v = 'second' where id = 100")
    source.flush()
    source.drain(M)
    row = next(row for row in source.rows(M) if row[0] == 100)
    assert (row[2], row[3]) == ("second", "long" * 1000)


@pytest.mark.parametrize("folded", ["here", "by Spark"], indirect=True)
@pytest.mark.usefixtures("folded")
def test_invariant_8_a_value_that_nobody_has_is_read_again_from_the_source(source: Lake) -> None:
    table = source.lake_table(M)
    cursor = table.state().cursor
    assert cursor is not None
    with summary(source.session, table.reached(cursor)):  # the hole of a resumed copy
        source.session.sql("delete from lake.src.m where id = 5")
    source.execute("update m set v = 'touched' where id = 5")
    source.flush()
    assert source.drain(M).repaired == 1
    row = next(row for row in source.rows(M) if row[0] == 5)
    assert (row[2], row[3]) == ("touched", "doc5" * 1000)


def test_invariant_7_a_merge_lands_once_whatever_the_cache_says(source: Lake) -> None:
    source.execute("insert into h values (9, 'once'); update m set v = 'once'")
    source.catch_up()
    before = {table: source.snapshots(table) for table in (M, H)}
    source.execute("delete from _pg2iceberg.mat_cursor")
    source.drain_all()
    assert {table: source.snapshots(table) for table in (M, H)} == before
    assert source.rows(H).count((9, "once")) == 1


def test_invariant_7_a_merge_that_dies_half_way_changes_nothing_and_is_done_again(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.execute("update m set v = 'again' where id < 5; insert into h values (9, 'again')")
    source.flush()
    expected = source.rows(M)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as dying:
        dying.setattr(TableDraft, "publish", die)
        with pytest.raises(KeyboardInterrupt):
            source.drain(M)
    assert source.rows(M) == expected
    source.drain_all()
    assert source.rows(M) == sorted(source.execute("select * from m"), key=repr)
    assert source.rows(H) == sorted(source.execute("select * from h"), key=repr)


def test_a_commit_of_others_beside_a_merge_does_not_fail_it(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as an expiry's: it meets the first tries of the commit that publishes the merge."""
    others = open_session(source.config)
    lead, met = ParsedOnce.lead, list[str]()

    def beside(self: ParsedOnce, table: Identifier, former: str, new: str) -> bool:
        if len(met) < 2:
            others.sql(f"alter table lake.src.m set tblproperties ('beside' = 'try {len(met)}')")
        met.append(new)
        return lead(self, table, former, new)

    source.execute("update m set v = 'beside' where id < 4")
    source.flush()
    with monkeypatch.context() as patched:
        patched.setattr(ParsedOnce, "lead", beside)
        assert source.drain(M).merges == 1
    assert len(met) == 3
    assert source.rows(M) == sorted(source.execute("select * from m"), key=repr)
    loaded = source.lake_table(M).loaded()
    assert loaded.properties["beside"] == "try 1" and list(loaded.metadata.refs) == ["main"]
    others.stop()


def test_a_commit_of_others_beside_a_merge_by_statements_does_not_fail_it(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It meets the first try of each statement on the merge's branch."""
    monkeypatch.setattr("cdc_assets.lake.publish.table_draft", lambda *_: None)
    met = list[str]()
    others = open_session(source.config)

    class Beside:
        def __getattr__(self, name: str) -> Any:
            return getattr(source.session, name)

        def sql(self, statement: str) -> Any:
            parts = ("create branch", "fast_forward", "drop branch")
            if not any(part in statement for part in parts) or statement in met:
                return source.session.sql(statement)
            met.append(statement)
            over = threading.Event()

            def commit() -> None:
                while not over.is_set():
                    others.sql("alter table lake.src.m set tblproperties ('beside' = 'a merge')")

            thread = threading.Thread(target=commit)
            thread.start()
            try:
                return source.session.sql(statement)
            finally:
                over.set()
                thread.join()

    source.execute("update m set v = 'beside' where id < 4")
    source.flush()
    session: Any = Beside()
    done = drain_module.drain(source.pipeline, session, M)
    assert done is not None and done.merges == 1
    assert len(met) == 3
    assert source.rows(M) == sorted(source.execute("select * from m"), key=repr)
    others.stop()


def test_appended_files_are_compressed_for_speed_unless_somebody_says_how(source: Lake) -> None:
    def codecs(value: str) -> list[str]:
        source.execute(f"insert into f values ({value}, 'v', 'd')")
        source.catch_up(F)
        loaded = source.lake_table(F).loaded()
        current = loaded.current_snapshot()
        assert current is not None
        paths = [
            entry.data_file.file_path
            for manifest in current.manifests(loaded.io)
            if manifest.content == ManifestContent.DATA
            and manifest.added_snapshot_id == current.snapshot_id
            for entry in manifest.fetch_manifest_entry(loaded.io)
            if entry.snapshot_id == current.snapshot_id
        ]
        files = [pq.ParquetFile(path.removeprefix("file:")) for path in paths]
        return [file.metadata.row_group(0).column(0).compression for file in files]

    assert codecs("101") == ["SNAPPY"]
    by_hand = "'write.parquet.compression-codec'='gzip'"
    source.session.sql(f"alter table lake.src.f set tblproperties ({by_hand})")
    assert codecs("102") == ["GZIP"]
    assert source.equal(F)


def test_nothing_to_do_makes_no_snapshot(source: Lake) -> None:
    source.flush()
    before = source.snapshots(M)
    source.drain_all()
    source.drain_all()
    assert source.snapshots(M) == before


def test_the_table_says_where_it_stands_and_pyiceberg_reads_it(source: Lake) -> None:
    source.execute("delete from m where id < 11")
    source.flush()
    drained = source.drain(M)
    state = source.lake_table(M).state()
    assert state.cursor is not None
    assert state.cursor.offset == drained.cursor.offset == 10
    loaded = source.lake_table(M).load()
    assert loaded is not None
    assert loaded.scan().to_arrow().num_rows == 10
