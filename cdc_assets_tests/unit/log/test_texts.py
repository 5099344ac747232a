"""Staged rows as columns: every text comes back as it was written."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc_assets.log.staged import files, texts

ANY = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
NAMES = st.lists(ANY.filter(bool), min_size=1, max_size=4, unique=True)


def staged(rows: list[dict[str, str | None]], chunks: int = 1) -> pa.ChunkedArray:
    written = [json.dumps(row, separators=(",", ":"), ensure_ascii=False) for row in rows]
    parts = [written[i::chunks] for i in range(chunks)]
    return pa.chunked_array([pa.array(part, pa.large_string()) for part in parts])


@given(st.data(), NAMES)
def test_every_text_comes_back(data: st.DataObject, names: list[str]) -> None:
    values = st.none() | ANY
    rows = data.draw(st.lists(st.fixed_dictionaries({}, optional=dict.fromkeys(names, values))))
    wanted = [{name: row.get(name) for name in names} for row in rows]
    assert texts.texts(staged(rows), names).to_pylist() == wanted
    sliced = (
        staged([{}, *rows])
        .slice(1)
        .cast(data.draw(st.sampled_from([pa.string(), pa.large_string()])))
    )
    assert texts.texts(sliced, names[:1]).to_pylist() == [{names[0]: w[names[0]]} for w in wanted]


def test_large_data_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "_PART_BYTES", 20)
    rows: list[dict[str, str | None]] = [{"id": str(i), "v": "x" * i} for i in range(50)]
    assert texts.texts(staged(rows), ["id", "v"]).to_pylist() == rows
    assert texts.texts(staged(rows, 3), ["id"])["id"].to_pylist() != []


def test_a_buffer_may_be_longer_than_its_rows() -> None:
    offsets = pa.py_buffer(b"\0" * 8 + (9).to_bytes(8, "little") + b"rest")
    data = pa.LargeStringArray.from_buffers(1, offsets, pa.py_buffer(b'{"v":"1"}rest'))
    assert texts.texts(pa.chunked_array([data]), ["v"]).to_pylist() == [{"v": "1"}]


def test_an_old_key_is_no_column() -> None:
    row: dict[str, str | None] = {"id": "1", files.OLD_KEY: '{"id":"2"}'}
    assert texts.texts(staged([row]), ["id"]).to_pylist() == [{"id": "1"}]


@pytest.mark.parametrize("bad", ['{"id":"1"', '["id"]', '{"id":"1"}{"id":"2"}', '{"id":1}'])
def test_anything_else_is_refused(bad: str) -> None:
    with pytest.raises(pa.ArrowInvalid):
        texts.texts(pa.chunked_array([pa.array([bad], pa.large_string())]), ["id"])
