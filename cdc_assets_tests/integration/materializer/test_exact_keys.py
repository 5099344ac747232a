"""Keys are told apart in the lake as Postgres does it, whatever their types and values are."""

from __future__ import annotations

import pytest

from cdc_assets.errors import CopyRestarted, TableProblem
from cdc_assets.log.copies.chunks import restart_copy
from cdc_assets.postgres.names import TableId
from cdc_assets.snapshot.coordinator import copy_table
from cdc_assets_tests.support.lake import Lake, NewLake

pytestmark = pytest.mark.spark

# Equal as keys, but not as text: numerics of another scale, zeros of another sign, …
SETUP = """
set timezone = 'UTC';
create type mood as enum ('fine', 'so so');
create type pair as (a int, b text);
create table every (n numeric, d numeric(6,2), c char(4), f float8, t text[], b bytea, j jsonb,
                    r int4range, i interval, m mood, p pair, v int,
                    primary key (n, d, c, f, t, b, j, r, i, m, p));
insert into every values
  (1.0, 1, 'a', '-0', '{1,NULL}', '', '{"a": 1.0}', '[1,2)', '1 mon', 'fine', '(1,)', 1),
  (2, 2, 'b', 'NaN', '{}', '\\x00', '1', 'empty', '0', 'so so', '(,)', 2),
  (3, 3, 'c', 0.1, '{"a b"}', '\\x01', '[]', '(,)', '1 d', 'fine', '(1,"x y")', 3);
create table periods (id int, until timestamptz, v int, primary key (id, until));
insert into periods values (1, 'infinity', 1), (1, '2026-01-01', 2), (1, '-infinity', 3),
  (1, '0044-03-15 BC', 4);
create table days (id int, day date, v int, primary key (id, day));
insert into days values (1, '2026-01-01', 1);
create table lists (a int[] primary key, v int);
insert into lists values ('{1,2}', 1);
create table amounts (n numeric(5,2) primary key, v int);
insert into amounts values (1, 1);
create table strict (id int primary key, d date, a int[]);
insert into strict values (1, null, '[0:1]={1,2}');
"""
# As the lake has them: what isn't text there is a value.
EVERY_TEXT = "n::text, d, c, f, t, b, j::text, r::text, i::text, m::text, p::text"
TABLES = ("every", "periods", "days", "lists", "amounts")
EVERY, PERIODS, DAYS, LISTS, AMOUNTS, STRICT = (
    TableId("public", name) for name in (*TABLES, "strict")
)


def _plain(row: tuple[object, ...]) -> str:
    return repr([bytes(value) if isinstance(value, bytearray) else value for value in row])


def _is_text(source: Lake, table: TableId, column: str) -> bool:
    loaded = source.lake_table(table).load()
    assert loaded is not None
    return str(loaded.schema().find_type(column)) == "string"


def test_keys_of_every_type_are_told_apart(new_lake: NewLake) -> None:
    strict = {"name": "strict", "columns": {"unrepresentable": "fail"}}
    with new_lake(SETUP, *TABLES, strict) as source:
        source.pin()
        for table in (EVERY, DAYS, LISTS, AMOUNTS, STRICT):
            copy_table(source.pipeline, source.session, table)
        with pytest.raises(CopyRestarted, match=r"until has a value .* kept as text"):
            copy_table(source.pipeline, source.session, PERIODS)
        source.pins.tick()
        copy_table(source.pipeline, source.session, PERIODS)
        assert _is_text(source, PERIODS, "until")

        source.execute("update every set n = 1.00, f = 0, i = '30 days' where n = 1")
        source.execute("update every set v = 22 where f = 'NaN'; delete from every where n = 3")
        source.execute("update every set v = 33, p = '(,x)' where p = '(1,)'::pair")
        source.execute("update periods set v = 11 where until = 'infinity'")
        source.execute("update periods set until = '2027-01-01' where until = '-infinity'")
        source.execute("insert into periods values (2, 'infinity', 5), (2, '-infinity', 6)")
        source.execute("insert into days values (2, '2026-01-02', 2)")
        source.flush()
        for table in (EVERY, PERIODS, DAYS):
            source.drain(table)
        # What no date, list or decimal holds is neither merged nor lost.
        source.execute("insert into days values (1, 'infinity', 3), (1, '-infinity', 4)")
        source.execute("insert into lists values ('[0:1]={1,2}', 2)")
        source.execute("insert into amounts values ('NaN', 2)")
        source.execute("insert into strict values (2, null, '{{7}}')")
        source.flush()
        with pytest.raises(TableProblem, match=r"column a got a value .* Set columns.unrep"):
            source.drain(STRICT)
        source.execute("delete from strict where id = 2")  # the same batch: nothing is left of it
        source.flush()
        for table in (DAYS, LISTS, AMOUNTS):
            before = source.rows(table)
            with pytest.raises(TableProblem, match=r"belongs to its key.*resync"):
                source.drain(table)
            row = source.row(table)
            assert row.state == "parked"
            assert source.rows(table) == before
            assert restart_copy(source.pipeline.store, row)
        source.pins.tick()
        for table in (DAYS, LISTS, AMOUNTS):
            copy_table(source.pipeline, source.session, table)
        source.execute("update days set v = v + 1; delete from lists where a = '{1,2}'")
        source.execute("update amounts set v = 3 where n = 'NaN'")
        source.catch_up()
        assert _is_text(source, DAYS, "day") and _is_text(source, LISTS, "a")
        printed = {EVERY: EVERY_TEXT, PERIODS: "id, until::text", DAYS: "id, day::text"}
        printed |= {LISTS: "a::text", AMOUNTS: "n::text"}
        for table, columns in printed.items():
            expected = source.execute(f"select {columns}, v from {table}")
            assert sorted(map(_plain, source.rows(table))) == sorted(map(_plain, expected))


KEYLESS = """
set timezone = 'UTC';
create table loose (f float8, d date, n numeric(5,2), a float4[], t timestamptz[], v int);
alter table loose replica identity full;
"""
# Each pair is the same in the lake, by policy or because its list has no bounds, or is not.
ROWS = (
    *(f"(null, '{x}infinity', null, null, null, 1)" for x in ("", "", "", "-", "-")),
    *(f"('{x}0', null, 'NaN', '{{NaN,{x}0}}', '{{infinity}}', 2)" for x in ("", "", "-", "-", "-")),
    *(f"(1, null, 1, '{x}{{1,2}}', null, 3)" for x in ("", "", "[0:1]=", "[0:1]=")),
)


def test_rows_without_a_key_are_counted_as_the_lake_has_them(new_lake: NewLake) -> None:
    table = TableId("public", "loose")
    with new_lake(KEYLESS, "loose") as source:
        source.execute(f"insert into loose values {', '.join(ROWS)}")
        source.pin()
        source.copy()
        one = "delete from loose where ctid = (select ctid from loose where {} limit 1)"
        for which in (
            *("d = 'infinity'", "d = '-infinity'"),
            *("f::text = '0'", "f::text = '-0'"),
            *("a = '{1,2}'", "array_lower(a, 1) = 0"),
        ):
            source.execute(one.format(which))
        source.execute(f"insert into loose values {ROWS[0]}, {ROWS[-1]}")
        source.flush()
        source.drain(table)
        found = [str(row[0]) for row in source.rows(table)]
        expected = source.execute("select f::text from loose")
        as_spark = {"0": "0.0", "1": "1.0", "-0": "-0.0", None: "None"}
        assert sorted(found) == sorted(as_spark[text] for (text,) in expected)
