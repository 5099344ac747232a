"""Table names are read and printed as SQL spells them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc_assets.postgres.names import TableId

identifiers = st.text(
    st.characters(exclude_characters="\0", codec="utf-8"), min_size=1, max_size=63
)


@given(identifiers, identifiers)
def test_printing_and_parsing_are_inverse(schema: str, name: str) -> None:
    table = TableId(schema, name)
    assert TableId.parse(str(table)) == table


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("orders", TableId("public", "orders")),
        ("Public.Orders", TableId("public", "orders")),
        ('public."My.Table"', TableId("public", "My.Table")),
        ('"a""b"."c"', TableId('a"b', "c")),
    ],
)
def test_unquoted_names_fold_and_quoted_ones_stay(text: str, expected: TableId) -> None:
    assert TableId.parse(text) == expected


@pytest.mark.parametrize("text", ["", ".", "a.", "a.b.c", "a b", '"a', "1a", "a;drop"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a table name"):
        TableId.parse(text)


def test_a_reserved_word_is_printed_quoted() -> None:
    assert str(TableId("public", "order")) == 'public."order"'
