"""Which column is which, from one relation to the next, whatever the catalog says by then."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc_assets.log.relation import Told
from cdc_assets.materializer.schema.match import Ambiguous, numbered, same_values
from cdc_assets.postgres.catalog import Attribute, Column
from cdc_assets.postgres.pgoutput import RelationColumn


@dataclass
class Table:
    """A table whose catalog is kept as Postgres keeps it: names and types by number."""

    live: dict[int, tuple[str, int]] = field(default_factory=dict)
    last: int = 0

    def add(self, name: str, type_oid: int = 23) -> None:
        self.last += 1
        self.live[self.last] = (name, type_oid)

    def number(self, name: str) -> int:
        return next(number for number, (known, _) in self.live.items() if known == name)

    def drop(self, name: str) -> None:
        del self.live[self.number(name)]

    def rename(self, name: str, to: str) -> None:
        number = self.number(name)
        self.live[number] = (to, self.live[number][1])

    def retype(self, name: str, type_oid: int) -> None:
        self.live[self.number(name)] = (name, type_oid)

    def told(self) -> Told:
        return Told("d", tuple(RelationColumn(n, t, -1, False) for n, t in self.live.values()))

    def columns(self) -> list[Column]:
        return [
            Column(name, "integer", number, type_oid=type_oid)
            for number, (name, type_oid) in self.live.items()
        ]

    def catalog(self) -> list[Attribute]:
        return [
            Attribute(n, *(self.live[n][0], False, self.live[n][1]), -1, "", False, None)
            if n in self.live
            else Attribute(n, f"........pg.dropped.{n}........", True, 0, -1, "", False, None)
            for n in range(1, self.last + 1)
        ]


def _table(*names: str) -> Table:
    table = Table()
    for name in names:
        table.add(name)
    return table


def test_dropped_and_added_again_is_another_column_and_renamed_is_not() -> None:
    for again, expected in ((True, [1, 3]), (False, [1, 2])):
        table = _table("a", "b")
        known = table.columns()
        if again:
            table.drop("b")
            table.add("c")
        else:
            table.rename("b", "c")
        assert numbered(known, table.told(), table.catalog(), 2) == expected


def test_two_swap_their_names() -> None:
    table = _table("a", "b", "c")
    known = table.columns()
    table.rename("a", "t")
    table.rename("b", "a")
    table.rename("t", "b")
    assert numbered(known, table.told(), table.catalog(), 3) == [1, 2, 3]


def test_the_catalog_is_ahead_of_the_log() -> None:
    table = _table("a")
    table.add("v", 25)
    known = table.columns()
    table.drop("v")
    table.add("v", 23)
    told = table.told()
    table.drop("v")
    table.add("v", 1184)
    assert numbered(known, told, table.catalog(), 2) == [1, 3]
    assert numbered(known, table.told(), table.catalog(), 2) == [1, 4]


def test_a_column_that_is_still_there_was_there_all_the_time() -> None:
    table = _table("a", "b")
    known = table.columns()
    table.rename("b", "c")
    told = table.told()
    table.add("x")
    table.drop("x")
    table.rename("c", "d")
    assert numbered(known, told, table.catalog(), 2) == [1, 2]


def test_nothing_is_guessed_of_a_column_that_is_still_there() -> None:
    table = _table("a", "b")
    known = table.columns()
    table.rename("b", "c")
    told = table.told()
    table.drop("c")
    table.add("d")
    with pytest.raises(Ambiguous, match="column c"):
        numbered(known, told, table.catalog(), 2)


def test_a_type_that_columns_are_often_changed_to_tells_nothing_of_a_new_name() -> None:
    table = _table("a", "b")
    known = table.columns()
    table.drop("b")
    table.add("c")
    told = table.told()  # c is the third, or b by another name that was dropped later
    table.retype("c", 20)
    table.rename("c", "d")
    with pytest.raises(Ambiguous, match="column c"):
        numbered(known, told, table.catalog(), 2)


@given(st.integers(0, 10**9))
def test_what_is_found_is_the_truth_or_of_columns_that_are_gone(seed: int) -> None:
    """No column that is there is taken for another one, nor another one for it."""
    rnd = random.Random(seed)
    table = _table("a", "b", "c")
    known, newest, names = table.columns(), table.last, iter(f"x{i}" for i in range(100))

    def change() -> None:
        action = rnd.choice(["add", "drop", "rename", "retype"])
        name = rnd.choice([name for name, _ in table.live.values()])
        if action == "add":
            table.add(next(names))
        elif action == "drop" and len(table.live) > 1:
            table.drop(name)
        elif action == "rename":
            table.rename(name, next(names))
        else:
            table.retype(name, 20)

    for _ in range(rnd.randrange(4)):
        change()
    told, truth = table.told(), list(table.live)
    for _ in range(rnd.randrange(3)):
        change()
    try:
        found = numbered(known, told, table.catalog(), newest)
    except Ambiguous:
        return
    gone = {a.number for a in table.catalog() if a.dropped}
    assert {
        pair
        for pair in zip(truth, found, strict=True)
        if len(set(pair)) == 2 and not set(pair) <= gone
    } == set()


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ("smallint", "bigint", True),
        ("bigint", "integer", True),
        ("integer", "text", False),
        ("real", "double precision", True),
        ("double precision", "real", False),
        ("numeric(8,2)", "numeric(12,2)", True),
        ("numeric(8,2)", "numeric(12,3)", False),
        ("numeric(8,2)", "numeric", False),
        ("character varying(5)", "text", True),
        ("character varying(5)", "character varying(9)", True),
        ("character varying(9)", "character varying(5)", False),
        ("character varying", "character varying(5)", False),
        ("text", "character varying", True),
        ("character(5)", "text", False),
        ("json", "jsonb", False),
    ],
)
def test_values_stay_what_they_are(before: str, after: str, same: bool) -> None:
    assert same_values(before, after, as_text=False) is same


def test_the_text_of_a_float_changes_with_its_type() -> None:
    assert not same_values("real", "double precision", as_text=True)
