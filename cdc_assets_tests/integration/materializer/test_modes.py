"""Modes soft_delete and append, and tables without a key: by real changes, to the very rows."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from pyspark.sql.connect.dataframe import DataFrame

from cdc_assets.errors import TableProblem
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support.lake import Lake, NewLake

pytestmark = pytest.mark.spark

S, A, K, X, U = (TableId("public", name) for name in "sakxu")
SETUP = """
create table s (id int primary key, v text, doc text);
alter table s alter doc set storage external;
insert into s select i, 'v' || i, repeat('doc' || i, 1000) from generate_series(1, 10) i;
create table a (id int primary key, v text, doc text);
alter table a alter doc set storage external;
insert into a select i, 'v' || i, repeat('doc' || i, 1000) from generate_series(1, 10) i;
create table k (v text);
insert into k values ('x'), ('x'), (null);
create table x (v text);
alter table x replica identity full;
insert into x values ('x'), ('x'), (null);
create table u (id int not null, v text);
create unique index u_id on u (id);
alter table u replica identity using index u_id;
insert into u select i, 'v' || i from generate_series(1, 5) i;
"""
TABLES: list[Any] = [
    {"name": "s", "mode": "soft_delete", "partition_by": ["bucket(2, id)"]},
    {"name": "a", "mode": "append", "partition_by": ["truncate(1, _op)"]},
    {"name": "k", "mode": "append"},
    "x",
    {"name": "u", "partition_by": ["truncate(2, v)"]},
]


@pytest.fixture(params=[3], ids="format-v{}".format)
def source(request: pytest.FixtureRequest, new_lake: NewLake) -> Iterator[Lake]:
    settings = {"lake": {"format_version": request.param}}
    with (
        new_lake(SETUP, *TABLES, **settings) as opened,
        nothing_kept(),
    ):
        opened.pin()
        opened.copy()
        yield opened


@contextmanager
def nothing_kept() -> Iterator[None]:
    """What Spark is told to keep it keeps until it is told otherwise, or ends."""
    kept = list[DataFrame]()
    persist, unpersist = DataFrame.persist, DataFrame.unpersist

    def keep(frame: DataFrame) -> object:
        kept.append(frame)
        return persist(frame)

    def give_back(frame: DataFrame) -> object:
        kept.remove(frame)
        return unpersist(frame)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DataFrame, "persist", keep)
        patch.setattr(DataFrame, "unpersist", give_back)
        yield
    assert kept == []


def _dicts(source: Lake, table: TableId, order: str) -> list[dict[str, Any]]:
    name = source.lake_table(table).sql_name
    return [row.asDict() for row in source.session.table(name).orderBy(order).collect()]


both_formats = pytest.mark.parametrize("source", [3, 2], indirect=True)


@both_formats
def test_soft_delete_keeps_rows_with_their_last_values_and_marks_them(source: Lake) -> None:
    source.execute("delete from s where id = 1")
    source.execute("update s set v = 'late' where id = 2; delete from s where id = 2")
    source.execute("insert into s values (20, 'short', 'd'); delete from s where id = 20")
    source.execute("delete from s where id = 3; insert into s values (3, 'again', 'd')")
    source.execute("update s set id = 40 where id = 4")
    source.flush()
    source.drain(S)
    rows = {row["id"]: row for row in _dicts(source, S, "id")}
    marked = {key for key, row in rows.items() if row["_deleted_at"] is not None}
    assert (set(rows) - {5, 6, 7, 8, 9, 10}, marked) == ({1, 2, 3, 4, 20, 40}, {1, 2, 4, 20})
    assert (rows[1]["v"], rows[1]["doc"]) == ("v1", "doc1" * 1000)
    assert (rows[2]["v"], rows[2]["doc"]) == ("late", "doc2" * 1000)
    assert (rows[3]["v"], rows[20]["v"]) == ("again", "short")
    assert rows[4]["doc"] == rows[40]["doc"] == "doc4" * 1000
    source.execute("insert into s values (1, 'back', 'd')")
    source.execute(
        "begin; insert into s values (50, 'x', 'd'); truncate s, a;"
        " insert into s values (60, 'after', 'd'); commit"
    )
    source.flush()
    source.drain(S)
    rows = {row["id"]: row for row in _dicts(source, S, "id")}
    assert {key for key, row in rows.items() if row["_deleted_at"] is None} == {60}
    assert rows[1]["v"] == "back"
    assert {50, 60} < set(rows)
    assert [c.equal for c in source.verify()] == [True] * 5


def test_soft_delete_keeps_a_row_that_had_another_key_on_the_way(source: Lake) -> None:
    """Though the lake's rows are of several moments, and it can't be read again any more."""
    source.pipeline.store.not_whole_before(source.row(S), Lsn(2**62))
    source.execute("update s set id = 90 where id = 1; update s set id = 1 where id = 90")
    source.execute("delete from s where id = 1")
    source.flush()
    source.drain(S)
    (gone,) = [row for row in _dicts(source, S, "id") if row["id"] == 1]
    assert gone["_deleted_at"] is not None
    assert gone["doc"] == "doc1" * 1000


@both_formats
def test_append_has_one_row_for_each_change_with_its_true_values(source: Lake) -> None:
    source.execute("update a set v = 'one' where id = 1")
    source.execute(
        "update a set v = 'two' where id = 1; update a set id = 11, v = 'k' where id = 2;"
        " update a set v = 'three' where id = 11"
    )
    source.execute("delete from a where id = 3; insert into a values (3, 'again', 'd')")
    source.execute("insert into k values ('new')")
    source.catch_up()
    copied = [row for row in _dicts(source, A, "id") if row["_xid"] is None]
    assert {(row["_op"], row["_ts"]) for row in copied} == {("I", None)}
    snapshot_lsn = source.lake_table(A).row.snapshot_lsn
    assert {row["_lsn"] for row in copied} == {int(snapshot_lsn or 0)}
    changes = [row for row in _dicts(source, A, "_lsn") if row["_xid"] is not None]
    assert all(row["_ts"] is not None for row in changes)
    found = [(r["_op"], r["id"], r["v"], r["doc"] and r["doc"][:4]) for r in changes]
    assert sorted(found, key=repr) == sorted(
        [
            ("U", 1, "one", "doc1"),
            ("U", 1, "two", "doc1"),
            ("D", 2, None, None),
            ("U", 11, "k", "doc2"),
            ("U", 11, "three", "doc2"),
            ("D", 3, None, None),
            ("I", 3, "again", "d"),
        ],
        key=repr,
    )
    # Without key and identity: append, and its copied rows are told from the new one.
    assert [(r["v"], r["_op"], r["_xid"] is None) for r in _dicts(source, K, "v")] == [
        (None, "I", True),
        ("new", "I", False),
        ("x", "I", True),
        ("x", "I", True),
    ]
    source.execute("truncate a; insert into a values (1, 'fresh', 'd')")
    source.flush()
    assert [c.equal for c in source.verify()] == [True] * 5
    assert [r["_op"] for r in _dicts(source, A, "_lsn")][-2:] == ["T", "I"]


@both_formats
def test_random_changes_in_every_mode_compare_equal(source: Lake) -> None:
    rnd = random.Random(5)
    for round_ in range(2):
        for _ in range(25):
            a, b, value = rnd.randrange(1, 15), rnd.randrange(1, 15), rnd.randrange(10**6)
            statements = []
            for t in "sa":
                statements += [
                    (
                        f"insert into {t} values ({a}, 'i{value}', repeat('n{value}', 1000))"
                        " on conflict do nothing"
                    ),
                    f"update {t} set v = 'u{value}' where id = {a}",
                    f"update {t} set doc = repeat('d{value}', 1000) where id = {a}",
                    f"delete from {t} where id = {a}",
                    (
                        f"update {t} set id = {b} where id = {a}"
                        f" and not exists (select from {t} where id = {b})"
                    ),
                ]
            statements += [
                "insert into x values ('x')",
                "delete from x where ctid = (select min(ctid) from x)",
                f"update x set v = '{value % 3}' where ctid = (select max(ctid) from x)",
                f"update u set v = 'u{value}' where id = {a}",
                (
                    f"update u set id = {b + 20} where id = {a}"
                    f" and not exists (select from u where id = {b + 20})"
                ),
                f"delete from u where id = {a + 20}",
            ]
            chosen = "; ".join(rnd.choices(statements, k=4))
            source.execute(f"begin; {chosen}; {rnd.choice(['commit', 'commit', 'rollback'])}")
        if round_:
            source.execute("truncate a, s, x")
            source.execute("insert into a values (1, 'v', 'd'); insert into x values ('x'), ('x')")
        source.catch_up()
        if round_ == 0:  # the last values of all that was deleted are those of the append table
            assert {r["id"] for r in _dicts(source, S, "id")} >= set(range(1, 11))
    # The modes' tables follow schema changes like others.
    source.execute("alter table a add c int default 3, drop v; insert into a values (2, 'd', 4)")
    source.execute("insert into s values (1, 'v', 'd'), (30, 'v', 'd')")
    source.execute("alter table s add u uuid default gen_random_uuid(); delete from s where id < 3")
    source.execute("alter table x rename v to w; insert into x values ('last')")
    source.flush()
    assert [(str(c.table), c.problem, c.keys) for c in source.verify() if not c.equal] == []
    copied = [row for row in _dicts(source, A, "_lsn") if row["_op"] in ("D", "T")]
    assert {row["c"] for row in copied} == {None}


@both_formats
def test_rows_swap_their_keys_and_move_with_their_partition_value(source: Lake) -> None:
    """The key of ``u`` is a unique index that is its replica identity."""
    source.execute(
        "begin; update u set id = -1 where id = 1; update u set id = 1, v = 'zz' where id = 2;"
        " update u set id = 2 where id = -1; update u set v = 'yy' where id = 3; commit"
    )
    source.flush()
    source.drain(U)
    expected = [(1, "zz"), (2, "v1"), (3, "yy"), (4, "v4"), (5, "v5")]
    assert source.rows(U) == expected
    loaded = source.lake_table(U).load()
    assert loaded is not None
    for row_filter, found in (("v == 'zz'", [1]), ("v == 'v3'", []), ("v == 'yy'", [3])):
        assert loaded.scan(row_filter).to_arrow()["id"].to_pylist() == found


def test_another_mode_takes_a_new_copy(source: Lake) -> None:
    table = source.config.table(A).model_copy(update={"mode": "mirror"})
    others = tuple(t for t in source.config.tables if t.id != A)
    changed = source.config.model_copy(update={"tables": (*others, table)})
    source.pipeline.config = changed
    with pytest.raises(TableProblem, match=r"its mode is mirror now.*resync public\.a"):
        source.drain(A)


def test_what_a_mode_cant_do_is_said_before_anything_is_copied(new_lake: NewLake) -> None:
    setup = (
        "create table p (v text); create table q (id int primary key, _op text);"
        " insert into p values ('x'); insert into q values (1, 'x')"
    )
    tables = [{"name": "p", "mode": "soft_delete"}, {"name": "q", "mode": "append"}]
    with new_lake(setup, *tables) as source:
        source.pin()
        p, q = (source.pipeline.store.table(t) for t in source.tables)
        assert p is not None
        assert q is not None
        assert (p.state, q.state) == ("parked", "parked")
        assert "without a key no row can be marked" in (p.reason or "")
        assert "column _op, which mode append adds" in (q.reason or "")


def test_invariant_8_a_row_takes_its_values_along_whatever_the_order_of_its_key(
    copied_lake: NewLake,
) -> None:
    """The stream tells a key's columns in the table's order; the key has its own."""
    modes = {"m": "mirror", "s": "soft_delete", "a": "append"}
    setup = ";".join(
        f"create table {name} (a int, b int, doc text, primary key (b, a));"
        f" alter table {name} alter doc set storage external;"
        f" insert into {name} values (1, 10, repeat('one', 1000)), (2, 20, repeat('two', 1000))"
        for name in modes
    )
    tables = [{"name": name, "mode": mode} for name, mode in modes.items()]
    with copied_lake(setup, *tables) as source:
        for name in modes:
            source.execute(f"delete from {name} where a = 2")
            source.execute(f"update {name} set a = 2, b = 20")
        source.catch_up()
        live = {"m": "true", "s": "_deleted_at is null", "a": "_op = 'U'"}
        for table in source.tables:
            rows = source.session.table(source.lake_table(table).sql_name).where(live[table.name])
            expected = source.execute(f"select a, b, doc from {table}")
            assert [tuple(row) for row in rows.select("a", "b", "doc").collect()] == expected
