"""Replica identity × unchanged TOAST, on each version; without one see ``pins/``.

What is asked of every staged row, derived from what the table really holds and not from any
decoder: each column's value is in ``_data`` and right, or the column is named in
``_unchanged_cols``; and it is named only if Postgres sent the value neither in the new nor in the
old tuple. A key change says what the key was.
"""

from __future__ import annotations

from typing import Any

import pytest

from cdc_assets_tests.support.flusher import Bench
from cdc_assets_tests.support.staged_rows import Row

# Kept out of line as it is, so every update that leaves it alone sends no value of it.
BIG = "repeat('0123456789', 700)"
OTHER = "repeat('abcdefghij', 700)"
VALUE = {"BIG": "0123456789" * 700, "OTHER": "abcdefghij" * 700}
COLUMNS = ("id", "k", "v", "doc", "blob")


@pytest.fixture
def source(any_source: Bench) -> Bench:
    return any_source


def _table(source: Bench, identity: str) -> None:
    """``k`` and ``doc`` and ``blob`` are out of line; ``k`` is in the index ``by_k``."""
    source.execute("""
        create table t (id int primary key, k text not null, v text, doc text, blob bytea);
        alter table t alter k set storage external, alter doc set storage external,
            alter blob set storage external;
        alter table t set (toast_tuple_target = 128);
        create unique index by_k on t (id, k);
    """)
    source.execute(
        "alter table t replica identity " + {"index": "using index by_k"}.get(identity, identity)
    )


def _rows(source: Bench) -> list[tuple[str, dict[str, Any], tuple[str, ...]]]:
    def plain(row: Row) -> tuple[str, dict[str, Any], tuple[str, ...]]:
        return row.op, dict(row.data), row.unchanged or ()

    return [plain(row) for row in source.log("public.t")]


@pytest.mark.parametrize("identity", ["default", "index", "full"])
def test_identity_and_toast(source: Bench, identity: str) -> None:
    _table(source, identity)
    config = source.config("public.t")
    source.flush(config)
    k = "repeat('k', 1500)"
    # A row of large values, one of small ones, one of nulls.
    source.execute(f"insert into t values (1, {k}, 'a', {BIG}, decode({BIG}, 'hex'))")
    source.execute("insert into t values (2, 'k', 'a', 'small', 'x'), (3, 'k', null, null, null)")
    big = {
        "id": "1", "k": "k" * 1500, "v": "a", "doc": VALUE["BIG"], "blob": "\\x" + VALUE["BIG"]
    }  # fmt: skip
    small = {"id": "2", "k": "k", "v": "a", "doc": "small", "blob": "\\x78"}
    nulls: dict[str, Any] = {"id": "3", "k": "k", "v": None, "doc": None, "blob": None}
    assert source.execute(
        "select pg_relation_size(reltoastrelid) > 0 from pg_class where oid = 't'::regclass"
    ) == [(True,)]
    expected: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
        ("I", big, ()),
        ("I", small, ()),
        ("I", nulls, ()),
    ]
    full = identity == "full"
    key = ("id", "k") if identity == "index" else ("id",)

    def but(row: dict[str, Any], *absent: str, **changed: Any) -> dict[str, Any]:
        return {n: v for n, v in {**row, **changed}.items() if n not in absent}

    def of_key(row: dict[str, Any]) -> dict[str, Any]:
        return {name: row[name] for name in key}

    def update(
        row: dict[str, Any], toasted: tuple[str, ...], old_tuple: bool, **changed: Any
    ) -> list[tuple[str, dict[str, Any], tuple[str, ...]]]:
        """``toasted``: what isn't in the new tuple. ``old_tuple``: the key's columns were sent."""
        had = tuple(COLUMNS) if full else key if old_tuple else ()
        missing = tuple(c for c in toasted if c not in had)
        new = but(row, *missing, **changed)
        if any(new.get(c, row[c]) != row[c] for c in key):
            carried = {"": of_key(row)} if missing else {}
            return [("D", of_key(row), ()), ("U", new | carried, missing)]
        return [("U", new, missing)]

    # Nothing of what is out of line changes: k is in the identity where it is an index's, and
    # Postgres sends the old key whenever a part of it is out of line.
    source.execute("update t set v = 'b' where id = 1")
    expected += update(big, ("k", "doc", "blob"), identity == "index", v="b")
    big = but(big, v="b")
    # One of them does.
    source.execute(f"update t set doc = {OTHER} where id = 1")
    expected += update(big, ("k", "blob"), identity == "index", doc=VALUE["OTHER"])
    big = but(big, doc=VALUE["OTHER"])
    # To null and back, so that the old tuple has a null there.
    source.execute("update t set blob = null where id = 1")
    expected += update(big, ("k", "doc"), identity == "index", blob=None)
    big = but(big, blob=None)
    source.execute("update t set blob = 'x' where id = 1")
    expected += update(big, ("k", "doc"), identity == "index", blob="\\x78")
    big = but(big, blob="\\x78")
    # The key, and nothing out of line.
    source.execute("update t set id = 11 where id = 1")
    expected += update(big, ("k", "doc"), True, id="11")
    big = but(big, id="11")
    # The other part of the index, which is out of line itself.
    source.execute("update t set k = repeat('l', 1500) where id = 11")
    expected += update(big, ("doc",), identity == "index", k="l" * 1500)
    big = but(big, k="l" * 1500)
    # Rows that have nothing out of line.
    source.execute("update t set v = 'c' where id = 2; update t set id = 12 where id = 2")
    expected += update(small, (), False, v="c")
    expected += update(but(small, v="c"), (), True, id="12")
    source.execute("update t set v = 'n' where id = 3; update t set id = 13 where id = 3")
    expected += update(nulls, (), False, v="n")
    expected += update(but(nulls, v="n"), (), True, id="13")
    # From small to large and the key in one: everything is sent.
    source.execute(f"update t set id = 14, doc = {BIG} where id = 13")
    expected += update(but(nulls, id="13", v="n"), (), True, id="14", doc=VALUE["BIG"])
    # And the key alone, of a row whose old tuple has a null.
    source.execute("update t set id = 15 where id = 14")
    expected += update(but(nulls, id="14", v="n", doc=VALUE["BIG"]), ("doc",), True, id="15")
    source.execute("delete from t")
    expected += [("D", of_key(big), ())]
    expected += [("D", of_key(but(small, id="12")), ()), ("D", of_key(but(nulls, id="15")), ())]

    source.flush(config)
    found = _rows(source)
    for position, (ours, wanted) in enumerate(zip(found, expected, strict=True)):
        assert ours == wanted, position


def test_without_a_key_every_update_is_a_pair(source: Bench) -> None:
    """All of a row identifies it: what is out of line comes from the old tuple, always."""
    source.execute("create table t (v text, doc text); alter table t replica identity full")
    source.execute("alter table t alter doc set storage external")
    config = source.config("public.t")
    source.flush(config)
    source.execute(f"insert into t values ('a', {BIG}), (null, null)")
    source.execute("update t set v = 'b' where v = 'a'; update t set v = 'n' where v is null")
    source.execute("delete from t where doc is null")
    source.flush(config)
    big = VALUE["BIG"]
    assert _rows(source) == [
        ("I", {"v": "a", "doc": big}, ()),
        ("I", {"v": None, "doc": None}, ()),
        ("D", {"v": "a", "doc": big}, ()),
        ("I", {"v": "b", "doc": big}, ()),
        ("D", {"v": None, "doc": None}, ()),
        ("I", {"v": "n", "doc": None}, ()),
        ("D", {"v": "n", "doc": None}, ()),
    ]
