"""Rows that differ are corrected in place; what changes meanwhile stays as it became."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cdc_assets.dagster import jobs
from cdc_assets.errors import TableProblem
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.lake.spark.session import SUMMARY_OPTION
from cdc_assets.lake.tables import LakeTable
from cdc_assets.maintenance.run import maintain
from cdc_assets.materializer import corrections
from cdc_assets.materializer.actions.commit import Change, Merged
from cdc_assets.materializer.merge import merge as applied
from cdc_assets.materializer.reread import rows_of
from cdc_assets.observe.status import collect
from cdc_assets.operations import repair
from cdc_assets.postgres.names import TableId
from cdc_assets.verify.difference import Comparison
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.support.lake import Lake, NewLake, copied

pytestmark = pytest.mark.spark

SETUP = """
create table t (id int primary key, v text, big text);
alter table t alter big set storage external;
insert into t select i, 'v' || i, repeat('long ', 5000) || i from generate_series(1, 30) i;
create table k (name text, at timestamptz, n numeric(9, 2), v text, primary key (name, at, n));
insert into k select 'it''s "' || i, '2024-02-29 12:00:00.5+01'::timestamptz, i, 'v'
  from generate_series(1, 9) i;
create table s (id uuid primary key, v text);
insert into s select md5(i::text)::uuid, 'v' || i from generate_series(1, 9) i;
create table h (v text);
insert into h values ('a'), ('b');
"""
T, K, S, H = (TableId("public", name) for name in "tksh")


@pytest.fixture(scope="module")
def spark_url(spark_server: SparkServer) -> str:
    return spark_server.ensure()


@pytest.fixture
def source(postgres_dsn: NewDatabase, spark_url: str, tmp_home: Path) -> Iterator[Lake]:
    tables = ("t", "k", {"name": "s", "mode": "soft_delete"}, {"name": "h", "mode": "mirror"})
    setup = SETUP + "alter table h replica identity full;"
    with copied(postgres_dsn(), spark_url, setup, *tables) as opened:
        yield opened


def damage(source: Lake, table: TableId, condition: str) -> None:
    """Spoil the texts of some of the lake's rows, as if a merge of ours had."""
    lake = source.lake_table(table)
    cursor = lake.state().cursor
    assert cursor is not None
    rows = source.session.table(lake.sql_name).where(condition)
    spoilt = [{**row.asDict(), "v": "wrong", "big": "wrong"} for row in rows.collect()]
    new = source.session.createDataFrame(spoilt, rows.schema)
    source.session.sql(f"delete from {lake.sql_name} where {condition}")
    writer = new.writeTo(lake.sql_name)
    for key, value in lake.reached(cursor).items():
        writer = writer.option(SUMMARY_OPTION + key, value)
    writer.append()


def meanwhile(monkeypatch: pytest.MonkeyPatch, do: Callable[[], None]) -> None:
    """Between a comparison and its repair, once."""
    refuse, todo = corrections.refuse_uncorrectable, [do]

    def interrupted(lake: LakeTable) -> None:
        refuse(lake)
        while todo:
            todo.pop()()

    monkeypatch.setattr(repair, "refuse_uncorrectable", interrupted)


def problem_of(source: Lake, table: TableId) -> str | None:
    """What ``status`` says of the table."""
    found = collect(source.pipeline).tables
    return next(one.problem for one in found if one.name == str(table))


def of(found: list[Comparison], table: TableId) -> Comparison:
    return next(one for one in found if one.table == table)


def test_what_somebody_else_did_to_a_table_is_undone_and_it_goes_on(source: Lake) -> None:
    source.flush()
    for statement in (
        "update lake.src.t set v = 'wrong' where id in (3, 4)",
        "delete from lake.src.t where id = 5",
        "insert into lake.src.t select 100, 'only here', ''",
        "insert into lake.src.t select * from lake.src.t where id = 7",
        "update lake.src.k set v = 'wrong' where n = 3",
        "delete from lake.src.k where n = 4",
        "insert into lake.src.k select concat(name, ' '), at, n, v from lake.src.k where n = 5",
        "update lake.src.s set v = 'wrong' where v = 'v3'",
        "delete from lake.src.s where v = 'v4'",
        "insert into lake.src.s select 'a2b6f9a4-0000-0000-0000-000000000000', 'only', null",
    ):
        source.session.sql(statement)
    said = r"somebody else changed rows .* cdc-assets verify --table public.t --repair"
    with pytest.raises(TableProblem, match=said):
        source.drain(T)
    assert re.search(said, str(problem_of(source, T)))  # though nothing waits to be applied
    source.execute("update t set v = 'meanwhile' where id = 20")  # goes on being logged
    found = source.verify(repair=True)
    assert [(one.outcome, one.repaired, one.problem) for one in found] == [
        ("equal", 5, None),
        ("equal", 3, None),
        ("equal", 3, None),
        ("equal", 0, None),
    ]
    assert of(found, T).remarks == ["5 keys were corrected"]
    assert problem_of(source, T) is None
    source.execute("update t set v = 'after' where id < 6; delete from k where n > 7")
    source.execute("delete from s where v = 'v3'")
    source.catch_up()
    assert source.equal(T)
    assert {one.outcome for one in source.verify()} == {"equal"}
    marked = source.session.sql("select v from lake.src.s where _deleted_at is not null order by v")
    assert [row[0] for row in marked.collect()] == ["only", "v3"]


def test_a_foreign_change_that_left_all_rows_equal_is_forgotten(source: Lake) -> None:
    source.session.sql("insert into lake.src.t select 100, 'only here', ''")
    source.session.sql("delete from lake.src.t where id = 100")
    assert source.lake_table(T).state().foreign is not None
    [done] = maintain(source.pipeline, lambda: source.session, [T])
    assert "somebody else changed rows" in str(done.problem)
    assert "somebody else changed rows" in str(problem_of(source, T))
    assert {(one.outcome, one.repaired) for one in source.verify(repair=True)} == {("equal", 0)}
    source.execute("update t set v = 'after' where id = 1")
    source.catch_up(T)
    assert source.equal(T)


def test_what_changes_between_comparison_and_repair_is_not_undone(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the damaged rows one is changed, one deleted, one made anew; another one only partly."""
    damage(source, T, "id < 7")

    def change() -> None:
        source.execute("update t set v = 'later', big = 'later' where id = 1")
        source.execute("delete from t where id = 2; delete from t where id = 3")
        source.execute("insert into t values (3, 'again', 'again'), (31, 'new', 'new')")
        source.execute("update t set v = 'toast' where id = 4")
        source.execute("update t set id = 50 where id = 5")
        source.catch_up(T)

    meanwhile(monkeypatch, change)
    found = of(source.verify(repair=True), T)
    # The rest of the row 4, and of the row 5 under its new key, is found by the next comparison.
    assert (found.outcome, found.repaired) == ("equal", 3)
    assert source.equal(T)


def test_what_is_not_applied_yet_comes_after_the_correction(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(source, T, "id < 3")

    def change() -> None:
        source.execute("update t set v = 'toast' where id = 1; delete from t where id = 2")

    meanwhile(monkeypatch, change)
    assert of(source.verify(repair=True), T).repaired == 2
    source.catch_up(T)
    assert source.equal(T)


def test_a_table_that_is_truncated_or_altered_or_written_to_meanwhile_is_left(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    for do, said in (
        (lambda: source.session.sql("delete from lake.src.t where id = 9"), "somebody else"),
        (lambda: source.execute("alter table t add w int"), "was truncated, rewritten or altered"),
        (lambda: source.execute("truncate t"), "was truncated, rewritten or altered"),
    ):
        damage(source, T, "id = 1")
        before = source.rows(T)
        with monkeypatch.context() as patch:
            seen = list[str]()

            def once(do: Callable[[], object] = do) -> None:
                do()

            meanwhile(patch, once)
            patch.setattr("cdc_assets.verify.compare.MENDS", 1)
            found = of(source.verify(repair=True), T)
            seen += found.remarks
        assert found.repaired == 0
        assert any(said in text for text in seen), (seen, found.problem)
        assert source.rows(T)[0] == before[0]
        source.verify(repair=True)
        assert source.verify()[0].equal


def test_tables_whose_rows_have_no_key_or_are_a_history_are_told_the_other_way(
    new_lake: NewLake,
) -> None:
    setup = "create table h (v text); create table a (id int primary key, v text);"
    setup += "insert into h values ('a'); insert into a values (1, 'a');"
    setup += "alter table h replica identity full;"
    tables = ({"name": "h", "mode": "mirror"}, {"name": "a", "mode": "append"})
    with new_lake(setup, *tables) as source:
        source.pin()
        source.copy()
        source.session.sql("insert into lake.src.h select * from lake.src.h")
        source.session.sql("update lake.src.a set v = 'wrong'")
        h, a = source.verify(repair=True)
        assert (h.outcome, h.repaired) == (a.outcome, a.repaired) == ("different", 0)
        assert h.unrepaired is not None and h.remarks == [f"not repaired: {h.unrepaired}"]
        assert "it has no key" in h.unrepaired and jobs._remedy(h).endswith(h.unrepaired)
        assert "it has no key" in h.remarks[0] and "cdc-assets resync public.h" in h.remarks[0]
        assert "its rows are its history" in a.remarks[0]


def test_a_corrected_row_is_masked_and_filtered_as_any(new_lake: NewLake) -> None:
    setup = "create table m (id int primary key, v text, secret text, kept boolean not null);"
    setup += "alter table m replica identity full;"
    setup += "insert into m select i, 'v', 'secret ' || i, i < 8 from generate_series(1, 9) i;"
    columns = {"mask": {"secret": "sha256"}, "rename": {"v": "value"}}
    table = {"name": "m", "where": "kept", "columns": columns, "metadata": ["_lsn", "_synced_at"]}
    with new_lake(setup, table, mask_salt="grains of salt, many") as source:
        source.pin()
        source.copy()
        before = source.session.table("lake.src.m").drop("_lsn", "_synced_at").orderBy("id")
        expected = before.collect()
        source.session.sql("delete from lake.src.m where id in (2, 3)")
        source.session.sql("update lake.src.m set secret = 'secret 4' where id = 4")
        source.session.sql(
            "insert into lake.src.m select 8, 'v', 'secret 8', false, _lsn, _synced_at"
            " from lake.src.m where id = 1"
        )
        assert [(c.outcome, c.repaired) for c in source.verify(repair=True)] == [("equal", 4)]
        assert before.collect() == expected
        lsns = source.session.sql(
            "select max(id), count(*) from lake.src.m group by _lsn"
        ).collect()
        assert sorted(map(tuple, lsns)) == [(4, 3), (7, 4)]


@pytest.mark.parametrize("mode", ["mirror", "soft_delete"])
def test_keys_that_only_the_lake_has_need_be_no_values_of_the_source(
    new_lake: NewLake, mode: str
) -> None:
    setup = "create type mood as enum ('sad', 'glad'); create table e (m mood, n numeric, v text,"
    setup += " primary key (m, n)); insert into e values ('sad', 1.00, 'v'), ('glad', 2, 'v');"
    with new_lake(setup, {"name": "e", "mode": mode}) as source:
        source.pin()
        source.copy()
        source.session.sql("insert into lake.src.e (m, n, v) values ('angry', '2', 'v')")
        source.session.sql("update lake.src.e set n = '1.0' where m = 'sad'")
        assert [(c.outcome, c.repaired) for c in source.verify(repair=True)] == [("equal", 3)]
        source.execute("update e set v = 'after'")
        source.catch_up()
        assert [c.outcome for c in source.verify()] == ["equal"]


def test_a_key_has_its_own_order(new_lake: NewLake) -> None:
    """Not that of the table's columns: (2, 1) is another row."""
    setup = "create table o (a int, b text, c int, v text, primary key (c, a));"
    setup += "insert into o select i, 'b', j, i || ' ' || j from generate_series(1, 3) i,"
    setup += " generate_series(1, 3) j;"
    with new_lake(setup, "o") as source:
        source.pin()
        source.copy()
        source.session.sql("update lake.src.o set v = 'wrong' where a = 1 and c = 2")
        source.session.sql("delete from lake.src.o where a = 3 and c = 1")
        source.session.sql("insert into lake.src.o values (4, 'b', 1, 'only here')")
        assert [(c.outcome, c.repaired) for c in source.verify(repair=True)] == [("equal", 3)]
        assert source.equal(TableId("public", "o"))


def test_many_rows_come_in_parts_of_which_none_takes_a_right_row_away(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corrections, "_TEXT_BYTES", 60_000)
    source.session.sql("update lake.src.t set v = 'wrong' where id < 10")
    source.session.sql("delete from lake.src.t where id = 1")
    source.session.sql("insert into lake.src.t select -id, v, big from lake.src.t where id > 20")
    counts = list[int]()

    def merge(change: Change) -> Merged:
        done = applied(change)
        counts.append(source.session.table("lake.src.t").where("id > 0").count())
        return done

    monkeypatch.setattr(corrections, "merge", merge)
    found = of(source.verify(repair=True), T)
    assert (found.outcome, found.repaired) == ("equal", 19)
    assert len(counts) > 2 and counts == sorted(counts)
    source.execute("delete from t where id = 2")
    source.catch_up(T)
    assert source.equal(T)


def test_somebody_who_writes_during_a_repair_fences_it(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.session.sql("update lake.src.t set v = 'wrong' where id < 10")
    todo = [1]

    def read(*about: Any) -> Any:
        while todo:
            source.session.sql(f"update lake.src.t set v = 'again' where id = {20 + todo.pop()}")
        return rows_of(*about)

    monkeypatch.setattr(repair, "rows_of", read)
    found = of(source.verify(repair=True), T)
    assert (found.outcome, found.repaired) == ("different", 0)
    assert "another writer took over meanwhile" in found.remarks[0]
    found = of(source.verify(repair=True), T)
    assert (found.outcome, found.repaired) == ("equal", 10)


def test_rows_without_a_key_are_told(source: Lake) -> None:
    source.session.sql("insert into lake.src.t values (null, 'no key', '')")
    found = of(source.verify(repair=True), T)
    assert (found.outcome, found.repaired) == ("different", 0)
    assert "1 rows of its lake table have NULL in their key" in found.remarks[0]
    assert source.lake_table(T).state().foreign is not None
