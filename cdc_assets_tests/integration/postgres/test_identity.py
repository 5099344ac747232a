"""Which tables Postgres would refuse to update once they are published: asked of Postgres."""

from __future__ import annotations

import psycopg
import pytest

from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.publication.identity import (
    Trouble,
    children,
    remedy,
    troubles,
    unidentified,
)
from cdc_assets_tests.conftest import NewDatabase

_PARTITIONED = "create table t (id int, v int) partition by range (id);"
_KEYED = "create table t (id int primary key, v int) partition by range (id);"
_LEAF = "create table l partition of t for values from (0) to (10);"
_FULL, _NOTHING = (
    "alter table {} replica identity full;",
    "alter table {} replica identity nothing;",
)
_INDEXED = """
    create table t (id int primary key, v int not null); create unique index x on t (v);
    alter table t replica identity using index x;
"""
_CANDIDATES = """
    create table t (id int not null, v int); create unique index part on t (id) where v > 0;
    create unique index nulls on t (v); create unique index "The x" on t (id) include (v);
"""
_BY_INDEX = """
    create table t (id int not null, v int) partition by range (id);
    create unique index x on t (id); alter table t replica identity using index x;
"""
_DEEP = """
    create table m partition of t for values from (0) to (10) partition by range (id);
    create table l partition of m for values from (0) to (10);
    create table k partition of t for values from (10) to (20);
"""
# What is made of table t; then the heap in trouble and what mends it, if one is.
CASES: dict[str, tuple[str, str, str]] = {
    "plain": ("create table t (id int primary key, v int)", "", ""),
    "keyless": ("create table t (id int, v int)", "t", "full"),
    "nothing": (
        "create table t (id int primary key, v int);" + _NOTHING.format("t"),
        "t",
        "default",
    ),
    "full": ("create table t (id int, v int);" + _FULL.format("t"), "", ""),
    "deferrable": ("create table t (id int primary key deferrable, v int)", "t", "full"),
    "named index": (_INDEXED, "", ""),
    "lost index": (_INDEXED + "drop index x", "t", "default"),
    "one could be named": (_CANDIDATES, "t", 'using index "The x"'),
    "partitions inherit a primary key": (_KEYED + _LEAF, "", ""),
    "partitions without a key": (_PARTITIONED + _LEAF, "l", "full"),
    "partitions don't inherit full": (_PARTITIONED + _FULL.format("t") + _LEAF, "l", "full"),
    "full partitions": (_PARTITIONED + _LEAF + _FULL.format("l"), "", ""),
    "partitions don't inherit a named index": (_BY_INDEX + _LEAF, "l", "using index l_id_idx"),
    "partitions of partitions": (_KEYED + _DEEP + _NOTHING.format("l"), "l", "default"),
    "a full partition of a table with a key": (_KEYED + _LEAF + _FULL.format("l"), "", ""),
    "children": (
        "create table t (id int primary key, v int); create table c () inherits (t)",
        "",
        "",
    ),
}


def _oid(connection: psycopg.Connection[tuple[object, ...]]) -> int:
    found = connection.execute("select 't'::regclass::oid::int").fetchone()
    assert found is not None
    return int(str(found[0]))


def _found(connection: psycopg.Connection[tuple[object, ...]], sent: str = "") -> list[Trouble]:
    return [
        *troubles(connection, [_oid(connection)], ["", *sent], {}, {}).get(_oid(connection), ())
    ]


def _refused(connection: psycopg.Connection[tuple[object, ...]], options: str = "") -> bool:
    """Whether Postgres refuses an UPDATE or a DELETE of the table, or of a heap of it."""
    connection.execute(b"create publication p for table only t" + options.encode())
    refused = set()
    for statement in ("update t set v = 2", "delete from t"):
        try:
            connection.execute(statement.encode())
        except psycopg.errors.ObjectNotInPrerequisiteState:
            refused.add(True)
        except psycopg.errors.InvalidColumnReference:
            refused.add(True)  # a generated column of the identity isn't sent
        else:
            refused.add(False)
    connection.execute("drop publication p")
    (verdict,) = refused
    return verdict


def test_what_postgres_refuses_and_what_mends_it(any_postgres_dsn: NewDatabase) -> None:
    with psycopg.connect(any_postgres_dsn(), autocommit=True) as source:
        for name, (setup, heap, how) in CASES.items():
            source.execute(setup.encode())
            found = _found(source)
            assert [(t.heap.name, t.remedy) for t in found] == [
                (heap, f"alter table public.{heap} replica identity {how};")
            ] * bool(heap), name
            source.execute("insert into t values (1, 1)")
            assert _refused(source) is bool(found), name
            for trouble in found:
                assert trouble.refused, name
                source.execute(remedy(found).encode())
                assert not _found(source), name
                assert not _refused(source), name
            source.execute("drop table t cascade")


_LISTED = """
    create table t (id int primary key, secret int not null, v int);
    create unique index x on t (secret); create unique index y on t (id) include (secret);
"""
_SPLIT = """
    create table t (id int primary key, secret int not null, v int) partition by range (id);
    create table l (v int, secret int not null, id int not null);
"""
_LEAVES = """
    create table t (id int, secret int not null, v int) partition by range (id);
    create table l (v int, secret int not null, id int not null);
    alter table t attach partition l for values from (0) to (10);
    create unique index x on l (id); create unique index y on l (secret);
"""
_BY_X = "alter table {} replica identity using index x;"
# Whether Postgres refuses its changes where the publication lists (id, v), and what mends it.
LISTS: dict[str, tuple[str, bool, str]] = {
    "its key is listed": (_LISTED, False, ""),
    "full": (_LISTED + _FULL.format("t"), True, "alter table public.t replica identity default;"),
    "full without a key": (
        "create table t (id int, secret int, v int);" + _FULL.format("t"), True, "",
    ),
    "neither": ("create table t (id int, secret int, v int)", True, ""),
    "a named index": (_LISTED + _BY_X.format("t"), True, ""),
    "a named index that includes more": (
        _LISTED + "alter table t replica identity using index y;", False, "",
    ),
    "another key": (
        _LISTED + "alter table t drop constraint t_pkey, add primary key (secret);", True, "",
    ),
    "a leaf's index, by another number": (
        _SPLIT + "alter table t attach partition l for values from (0) to (10);", False, "",
    ),
    "a full leaf": (
        _SPLIT + _LEAF.replace("l ", "k ", 1) + _FULL.format("k"),
        True, "alter table public.k replica identity default;",
    ),
    "a full root": (
        _SPLIT + _LEAF.replace("l ", "k ", 1) + _FULL.format("t"), False, "",
    ),
    "a leaf's other index": (
        _LEAVES + "alter table l replica identity using index y;", True, "",
    ),
}  # fmt: skip


def test_what_postgres_refuses_where_columns_are_listed(any_postgres_dsn: NewDatabase) -> None:
    options = " (id, v) with (publish_via_partition_root = true)"
    with psycopg.connect(any_postgres_dsn(), autocommit=True) as source:
        for name, (setup, refused, how) in LISTS.items():
            source.execute(setup.encode())
            source.execute("insert into t (id, secret, v) values (1, 1, 1)")
            assert _refused(source, options) is refused, name
            source.execute(b"create publication p for table only t" + options.encode())
            found = unidentified(source, "p", [_oid(source)]).get(_oid(source), ())
            assert [(t.refused, t.remedy) for t in found] == [(True, how)] * refused, name
            if how:
                source.execute(remedy(found).encode())
                source.execute("update t set v = 2")
                assert not unidentified(source, "p", [_oid(source)]), name
            source.execute("drop table t; drop table if exists l; drop publication p")


def test_partitions_that_identify_rows_by_something_else(any_postgres_dsn: NewDatabase) -> None:
    """Postgres takes their changes, but the old tuples lack the key that the log uses."""
    with psycopg.connect(any_postgres_dsn(), autocommit=True) as source:
        source.execute("""
            create table t (id int primary key, v int not null) partition by range (id);
            create table l partition of t for values from (0) to (10);
            create unique index x on l (v);
            alter table l replica identity using index x;
            insert into t values (1, 1);
        """)
        (found,) = _found(source)
        assert (found.refused, _refused(source)) == (False, False)
        assert found.remedy == "alter table public.l replica identity default;"
        assert found.what == "its rows are identified by (v), not by the key (id)"
        source.execute("drop table t")
        source.execute("""
            create table t (id int, v int) partition by range (id);
            create table l partition of t for values from (0) to (10);
            alter table l add primary key (id);
        """)
        (found,) = _found(source)
        assert found.remedy == "alter table public.l replica identity full;"
        assert "the table has no key" in found.what


def test_generated_columns_of_an_identity(any_postgres_dsn: NewDatabase) -> None:
    stored = "create table t (id int, v int, g int generated always as (id * 2) stored{});"
    with psycopg.connect(any_postgres_dsn(), autocommit=True) as source:
        sends = source.info.server_version >= 180000
        asked = " with (publish_generated_columns = stored)" if sends else ""
        for key, rest in (", primary key (g)", ""), ("", _FULL.format("t")):
            source.execute((stored.format(key) + rest).encode())
            source.execute("insert into t values (1, 1)")
            found = _found(source)
            # Before 18 the server lets it pass, and a key that isn't sent is of no use to the log.
            assert bool(found) is (sends or key != "")
            assert _refused(source) is any(t.refused for t in found) is sends
            if sends:
                assert not _found(source, "s")
                assert not _refused(source, asked)
            source.execute("drop table t")
        if sends:
            source.execute(
                "create table t (id int primary key, v int, g int generated always as"
                " (id * 2) virtual); alter table t replica identity full;"
                " insert into t values (1, 1)"
            )
            (found_,) = _found(source, "s")
            assert _refused(source, asked) is found_.refused is True
            assert "(g)" in found_.what


def test_children_that_are_no_partitions(postgres_dsn: NewDatabase) -> None:
    with psycopg.connect(postgres_dsn(), autocommit=True) as source:
        source.execute("create table t (id int primary key); create table c () inherits (t)")
        assert children(source, [_oid(source)]) == {_oid(source): [TableId("public", "c")]}
        source.execute("drop table t cascade; create table t (id int) partition by range (id)")
        source.execute("create table l partition of t default")
        assert children(source, [_oid(source)]) == {}


@pytest.mark.parametrize("count", [0, 1])
def test_no_table_costs_nothing(postgres_dsn: NewDatabase, count: int) -> None:
    with psycopg.connect(postgres_dsn(), autocommit=True) as source:
        assert troubles(source, [4294967295] * count, "", {}, {}) == {}
