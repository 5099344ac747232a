"""Values inside of JSON strings, escaped as the standard library does it."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc_assets.flusher.decode import json_text
from cdc_assets.flusher.decode.json_text import binary_array, escape

# Few kinds of characters to be escaped, and many.
_TEXT = st.one_of(st.text('a"\\ü', max_size=20), st.text('a"\\\n\r\t\x01\x1f\x7f€', max_size=20))


@given(values=st.lists(_TEXT, max_size=20), before=st.integers(0, 3))
def test_escaped_values_are_what_the_standard_library_makes(values: list[str], before: int) -> None:
    array = pa.array([value.encode() for value in values], pa.large_binary())[before:]
    expected = [json.dumps(value, ensure_ascii=False)[1:-1] for value in values[before:]]
    assert [value.decode() for value in escape(array).to_pylist()] == expected


@given(values=st.lists(st.binary(max_size=20), max_size=20))
def test_passes_and_cuts_make_the_same_of_any_bytes(values: list[bytes]) -> None:
    array = pa.array(values, pa.large_binary())
    assert escape(array).equals(json_text._cut(array))


def _long(unit: str) -> pa.LargeBinaryArray:
    data = np.frombuffer(unit.encode() * (4_000_000 // len(unit)), np.uint8)
    return binary_array(np.array([0, len(data)], np.int64), data)


@pytest.mark.parametrize(
    ("unit", "cuts"),
    [
        ("a" * 1000 + '"', False),  # one kind
        ("a" * 1000 + '"\n\\', True),  # few characters of three kinds
        ('ab"\n\t\\', False),  # many of four kinds: cuts would take 70 times as much memory
    ],
)
def test_the_cheaper_way_is_taken(monkeypatch: pytest.MonkeyPatch, unit: str, cuts: bool) -> None:
    ways = list[int]()
    real: Callable[[pa.LargeBinaryArray], pa.LargeBinaryArray] = json_text._cut

    def cut(values: pa.LargeBinaryArray) -> pa.LargeBinaryArray:
        ways.append(len(values))
        return real(values)

    monkeypatch.setattr(json_text, "_cut", cut)
    array = _long(unit)
    (text,) = escape(array).to_pylist()
    assert text.decode() == json.dumps(array[0].as_py().decode())[1:-1]
    assert bool(ways) == cuts
