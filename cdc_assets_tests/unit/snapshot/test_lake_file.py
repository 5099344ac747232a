"""The copy's Parquet file: what is in it, and how each column is written."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cdc_assets.postgres.types import _ARROW, arrow_type
from cdc_assets.snapshot import lake_file
from cdc_assets.snapshot.convert import DoesNotFit, LakeField, convert, repeats
from cdc_assets.snapshot.lake_file import LakeFile

ROWS = 1_000
FIELDS = (
    LakeField("id", "int8", "bigint", 1, None, "null"),
    LakeField("kind", "text", "string", 2, None, "null"),
    LakeField("note.text", "text", "string", 3, None, "null"),
    LakeField("tags", "text[]", "array<string>", 4, 5, "null"),
    LakeField("price", "numeric", "decimal(15,2)", 6, None, "null"),
    LakeField("tax", "numeric", "decimal(15,2)", 7, None, "null"),
)
REPEAT = {"kind", "tags", "tax"}


def _batch(first: int) -> pa.RecordBatch:
    """Rows from ``first`` on, as COPY's values are, decimals as text."""
    numbers = range(first, first + ROWS)
    columns: list[Sequence[Any]] = [
        list(numbers),
        ["even" if n % 2 else None for n in numbers],
        [f"note {n}" for n in numbers],
        [["a", "b"] if n % 3 else [] for n in numbers],
        [f"{n}.50" for n in numbers],
        ["NaN" if n % 5 else "-0.05" for n in numbers],
    ]
    return pa.record_batch(dict(zip([f.name for f in FIELDS], columns, strict=True)))


@pytest.fixture
def file(tmp_path: Path) -> LakeFile:
    return LakeFile(f"file://{tmp_path}/data", {}, 1, FIELDS)


def _written(file: LakeFile, batches: Sequence[pa.RecordBatch]) -> pq.ParquetFile:
    with file:
        for batch in batches:
            file.write(batch)
    assert file.path is not None
    return pq.ParquetFile(file.path.removeprefix("file://"))


def test_the_file_has_the_rows_of_all_batches(
    file: LakeFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [_batch(0), _batch(ROWS), _batch(2 * ROWS)]
    monkeypatch.setattr(lake_file, "ROW_GROUP_BYTES", 2 * batches[0].nbytes - 1)
    written = _written(file, batches)
    assert [written.metadata.row_group(n).num_rows for n in range(2)] == [2 * ROWS, ROWS]
    last = written.read().slice(3 * ROWS - 4).to_pylist()
    assert last[0] == {
        "id": 2996,
        "kind": None,
        "note.text": "note 2996",
        "tags": ["a", "b"],
        "price": Decimal("2996.50"),
        "tax": None,
    }
    assert [row["tax"] for row in last] == [None, None, None, None]
    assert written.read().column("tax")[5].as_py() == Decimal("-0.05")


def test_only_what_repeats_gets_a_dictionary(file: LakeFile) -> None:
    assert _dictionaries(_written(file, [_batch(0)])) == REPEAT


def test_the_first_values_count_for_the_files_that_follow(
    file: LakeFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _written(file, [_batch(0)])
    monkeypatch.setattr(lake_file, "repeats", lambda _: pytest.fail("it looked again"))
    another = LakeFile(tmp_path.as_uri(), {}, 1, FIELDS, like=file)
    assert _dictionaries(_written(another, [_batch(1)])) == REPEAT


def _dictionaries(written: pq.ParquetFile) -> set[str]:
    group = written.metadata.row_group(0)
    columns = [group.column(n) for n in range(group.num_columns)]
    return {c.path_in_schema.removesuffix(".list.element") for c in columns if _has_dictionary(c)}


def _has_dictionary(column: Any) -> bool:
    return column.dictionary_page_offset is not None


def test_a_local_file_is_written_for_speed_another_for_size(
    file: LakeFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _compression(_written(file, [_batch(0)])) == "SNAPPY"
    sent = pa.BufferOutputStream()
    monkeypatch.setattr(LakeFile, "_create", lambda _: sent)
    with LakeFile("s3://bucket/data", {}, 1, FIELDS) as remote:
        remote.write(_batch(0))
    assert _compression(pq.ParquetFile(sent.getvalue())) == "ZSTD"


def _compression(file: pq.ParquetFile) -> str:
    return str(file.metadata.row_group(0).column(0).compression)


@pytest.mark.parametrize("policy", ["null", "clamp"])
def test_decimals_are_the_same_whether_they_repeat_or_not(policy: str) -> None:
    distinct = ["NaN", "Infinity", "-Infinity", None, "0.00", "-9999999999999.99", "12.30"]
    field = LakeField("n", "numeric", "decimal(15,2)", 1, None, policy)

    def converted(texts: list[str | None]) -> list[object]:
        batch = pa.record_batch({"n": pa.array(texts, pa.string())})
        return convert(batch, [field], pa.schema([field.arrow])).column(0).to_pylist()  # type: ignore[no-any-return]

    assert not repeats(pa.array(distinct))
    assert repeats(pa.array(distinct * 50))
    assert converted(distinct * 50) == converted(distinct) * 50


def test_a_repeated_value_without_a_form_in_the_lake_is_refused() -> None:
    field = LakeField("n", "numeric", "decimal(15,2)", 1, None, "fail")
    batch = pa.record_batch({"n": ["1.00", "NaN"] * 100})
    with pytest.raises(DoesNotFit, match="n"):
        convert(batch, [field], pa.schema([field.arrow]))


@pytest.mark.parametrize(
    "lake", [*_ARROW, "decimal(38,9)", "array<string>", "array<decimal(15,2)>", "array<boolean>"]
)
def test_values_of_every_type_can_repeat(lake: str) -> None:
    kind = arrow_type(lake)
    assert repeats(pa.nulls(50, kind))
    assert repeats(pa.array([], kind))


@pytest.mark.parametrize(
    ("values", "few"),
    [
        ([True, False] * 50, True),
        ([b"x", None] * 50, True),
        ([Decimal("1.00")] * 50, True),
        ([[1, 2]] * 50, True),
        ([[n] for n in range(50)], False),
        (list(range(50)), False),
        ([n % 10 for n in range(100)], True),
        ([n % 11 for n in range(100)], True),
        ([n % 60 for n in range(100)], False),
        ([n // 8 for n in range(100)], False),
    ],
)
def test_repeats(values: list[object], few: bool) -> None:
    assert repeats(pa.array(values)) is few


def test_a_file_whose_last_rows_fail_is_deleted(
    file: LakeFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise MemoryError

    monkeypatch.setattr(lake_file, "ROW_GROUP_BYTES", 1)
    file.write(_batch(0))
    monkeypatch.setattr(lake_file, "ROW_GROUP_BYTES", 2**40)
    file.write(_batch(ROWS))
    monkeypatch.setattr(file, "_write_group", fails)
    with pytest.raises(MemoryError):
        file.__exit__(None)
    assert file.path is not None
    assert not Path(file.path.removeprefix("file://")).exists()
