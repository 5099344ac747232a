"""Patterns of table names, and which tables a new source takes."""

from __future__ import annotations

import pytest

from cdc_assets.config.patterns import TablePattern, matching
from cdc_assets.errors import ConfigurationError
from cdc_assets.messages.findings import Finding
from cdc_assets.postgres.names import TableId
from cdc_assets.setup.choice import choose
from cdc_assets.setup.inventory import Listed

NAMES = [
    TableId("public", "orders"),
    TableId("public", "order_lines"),
    TableId("public", "My.Table"),
    TableId("public", "a[b]"),
    TableId("sales", "orders"),
]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("public.orders", ["public.orders"]),
        ("orders", ["public.orders"]),
        ("ORDERS", ["public.orders"]),
        ("order*", ["public.orders", "public.order_lines"]),
        ("public.order?", ["public.orders"]),
        ("*.orders", ["public.orders", "sales.orders"]),
        ('"My.Table"', ['public."My.Table"']),
        ('public."a[b]"', ['public."a[b]"']),
        ('"order*"', []),
        ("sales.*", ["sales.orders"]),
    ],
)
def test_a_pattern_stands_for(pattern: str, names: list[str]) -> None:
    found, idle = matching([TablePattern.parse(pattern)], NAMES)
    assert [str(table) for table in found] == names
    assert idle == ([] if names else [pattern])


@pytest.mark.parametrize("text", ["", "a.b.c", 'x"y', "public.", "a b"])
def test_what_is_no_pattern_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"write public\.orders"):
        TablePattern.parse(text)


def listed(name: str, *codes: str) -> Listed:
    found = tuple(Finding(code, "error", f"{name} is {code}.", "Mend it.") for code in codes)
    return Listed(TableId.parse(name), None, 0, 0, (), "default", found)


FOUND = [
    listed("fine"),
    listed("unread", "select_privilege"),
    listed("keyless", "replica_identity"),
    listed("gone", "table_unlogged"),
]


@pytest.mark.parametrize(
    ("wanted", "exclude", "tables", "left"),
    [
        ([], [], "fine unread", "keyless gone"),
        (["public.*"], ["unread", "gone"], "fine", "keyless"),
        (["keyless"], [], "keyless", ""),
        (["keyless", "*"], [], "fine unread keyless", "gone"),
    ],
)
def test_a_pattern_leaves_out_what_a_name_takes(
    wanted: list[str], exclude: list[str], tables: str, left: str
) -> None:
    choice = choose(FOUND, wanted, exclude)
    assert [t.name for t in choice.tables] == tables.split()
    assert [t.name for t in choice.left] == left.split()


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (["gone"], r"public\.gone: gone is table_unlogged\. Mend it\."),
        (["fine", "none.*"], r"has no table none\.\*"),
        (["gon*"], "no table is left"),
        (["a.b.c"], r"write public\.orders"),
    ],
)
def test_a_name_that_cannot_be_taken_is_refused(wanted: list[str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        choose(FOUND, wanted, [])
