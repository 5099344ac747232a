"""Values inside of JSON strings, escaped as the standard library does it."""

from __future__ import annotations

import json

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from cdc_assets.flusher.decode.json_text import escape

# Few kinds of characters to be escaped, and many.
_TEXT = st.one_of(st.text('a"\\ü', max_size=20), st.text('a"\\\n\r\t\x01\x1f\x7f€', max_size=20))


@given(values=st.lists(_TEXT, max_size=20), before=st.integers(0, 3))
def test_escaped_values_are_what_the_standard_library_makes(values: list[str], before: int) -> None:
    array = pa.array([value.encode() for value in values], pa.large_binary())[before:]
    expected = [json.dumps(value, ensure_ascii=False)[1:-1] for value in values[before:]]
    assert [value.decode() for value in escape(array).to_pylist()] == expected
