"""Columns may be called what the merge calls its own: in each mode, with and without a key."""

from __future__ import annotations

import pytest

from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support.lake import NewLake

pytestmark = pytest.mark.spark

_HELPERS = """
off op lsn ts xid commit_lsn unchanged data key row row_key source unknown gone of old
last told net copy left known_0 missing text_0 c0 c1 s0 t0 k0 v0 old_0 id0 gone_id0 age
value r x e t s
"""
NAMES = _HELPERS.split()
_LISTED = ", ".join(f'"{name}" text' for name in NAMES)
_KEYED = f"id int, {_LISTED}, doc text storage external, primary key (id, gone, key, c1)"
SETUP = f"""
create table m ({_KEYED}); create table d ({_KEYED}); create table a ({_KEYED});
create table h (id int, {_LISTED}); alter table h replica identity full;
"""


def test_no_name_is_taken(new_lake: NewLake) -> None:
    tables = [
        *("m", "h"),
        {"name": "d", "mode": "soft_delete"},
        {"name": "a", "mode": "append"},
    ]
    with new_lake(SETUP, *tables) as source:
        values = ", ".join(f"'{name}' || i" for name in NAMES)
        rows = f"select i, {values}{{}} from generate_series(1, 5) as i"
        for table in ("m", "d", "a"):
            source.execute(f"insert into {table} " + rows.format(", repeat('doc' || i, 2000)"))
        source.execute("insert into h " + rows.format(""))
        source.pin()
        source.copy()
        for table in ("m", "d", "a"):
            source.execute(f"update {table} set gone = 'g', ts = 'now' where id = 1")
            source.execute(f"update {table} set net = 'n' where id = 2")
            source.execute(f"delete from {table} where id = 3")
        source.execute("alter table m add column v1 int default length(random()::text)")
        source.execute("update m set x = 'told' where id = 4")  # a row of the new relation
        source.execute("update h set net = null where id = 1; delete from h where id = 2")
        source.catch_up()
        # A key that changed is a deleted one and a new one.
        for name, extra, count in (("m", 0, 4), ("h", 0, 4), ("d", 1, 6), ("a", 4, 9)):
            found = source.rows(TableId("public", name))
            expected = source.execute(f"select * from {name}")
            assert len(found) == count
            assert set(expected) <= {row[: len(row) - extra] for row in found}, name
