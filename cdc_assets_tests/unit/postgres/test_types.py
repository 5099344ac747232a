"""What of the type table needs no server: how array literals are taken apart."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from cdc_assets.postgres.types import ELEMENT

# As Postgres's array_out writes them.
_SPECIAL = re.compile(r'[\s{}",\\]')


def _written(element: str | None) -> str:
    if element is None:
        return "NULL"
    if element and element.upper() != "NULL" and not _SPECIAL.search(element):
        return element
    return '"' + re.sub(r'(["\\])', r"\\\1", element) + '"'


@given(
    st.lists(st.none() | st.text(st.sampled_from("aZ0 \t\n\\\"'{}[]=,;é\U0001f600"), max_size=9))
)
def test_elements_are_what_was_written(elements: list[str | None]) -> None:
    literal = "{" + ",".join(map(_written, elements)) + "}"
    assert re.findall(ELEMENT, literal) == [_written(element) for element in elements]
