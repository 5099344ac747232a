"""LSNs compare as numbers and print as Postgres prints them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc_assets.postgres.lsn import Lsn


@given(st.integers(0, 2**64 - 1))
def test_printing_and_parsing_are_inverse(value: int) -> None:
    assert Lsn.parse(str(Lsn(value))) == Lsn(value)


def test_order_is_of_numbers_not_of_text() -> None:
    assert Lsn.parse("9/0") < Lsn.parse("10/0")
    assert Lsn.parse("0/10") - Lsn.parse("0/F") == 1


@pytest.mark.parametrize("text", ["", "0", "0/", "/0", "0/123456789", "g/0", "0/0 0/0"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not an LSN"):
        Lsn.parse(text)
