"""Invariant 8: the last change of each key wins, with all of its row."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc_assets.config.sections import S3Config
from cdc_assets.log.batch import Facts, Window
from cdc_assets.log.staged.files import STAGED_SCHEMA, StagedRows
from cdc_assets.log.staged.storage import Storage
from cdc_assets.log.store import LogEntry
from cdc_assets.materializer import winners as module
from cdc_assets.materializer.events import Batch
from cdc_assets.materializer.winners import Winners, winners
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId

LOCAL = Storage.of(S3Config())
AT = datetime(2026, 1, 1, tzinfo=UTC)
Row = dict[str, str | None]
KEY = ["b", "a"]
TEXT = st.sampled_from(["1", "2", "11", "", "é", '"'])
CHANGES = st.lists(st.tuples(st.sampled_from("IUD"), TEXT, TEXT, st.none() | TEXT), max_size=40)


@dataclass(frozen=True)
class Held(Batch):
    """A batch of rows that are here."""

    table: pa.Table = None

    def rows(self, most_bytes: int) -> pa.Table | None:
        return self.table if self.table["data"].nbytes <= most_bytes else None


def held(changes: list[tuple[str, str, str, str | None]], first: int = 0) -> Held:
    rows = [
        json.dumps({"a": a, "b": b} | ({} if op == "D" else {"v": v}), ensure_ascii=False)
        for op, a, b, v in changes
    ]
    offsets = pa.array(range(first, first + len(rows)), pa.int64())
    ops = pa.array([op for op, *_ in changes], pa.string())
    data, unchanged = pa.array(rows, pa.large_string()), pa.nulls(len(rows), pa.string())
    table = pa.table({"off": offsets, "op": ops, "unchanged": unchanged, "data": data})
    return Held((), Window(0, Lsn.ZERO), LOCAL, table)


def facts(rows: int, truncate: int | None = None) -> Facts:
    return Facts(rows, rows, truncate, truncate, frozenset(), frozenset())


def found(won: Winners | None) -> tuple[list[Row], list[Row]]:
    assert won is not None
    rows = [row["row"] for row in won.rows.to_pylist()]
    return rows, [key["key"] for key in won.keys.to_pylist()]


@given(CHANGES, st.none() | st.integers(0, 40))
def test_invariant_8_the_last_change_of_a_key_wins(
    changes: list[tuple[str, str, str, str | None]], truncate: int | None
) -> None:
    counted = changes if truncate is None else changes[truncate + 1 :]
    last = {(a, b): (op, v) for op, a, b, v in counted}
    won = winners(held(changes), facts(len(changes), truncate), KEY, ["a", "v", "b"])
    rows, keys = found(won)
    assert sorted(map(repr, keys)) == sorted(repr({"b": b, "a": a}) for a, b in last)
    assert sorted(map(repr, rows)) == sorted(
        repr({"a": a, "v": v, "b": b}) for (a, b), (op, v) in last.items() if op != "D"
    )


@given(CHANGES, st.none() | st.integers(0, 40))
def test_a_key_whose_first_change_is_an_insert_had_no_row(
    changes: list[tuple[str, str, str, str | None]], truncate: int | None
) -> None:
    counted = changes if truncate is None else changes[truncate + 1 :]
    first = {(a, b): op for op, a, b, _ in reversed(counted)}
    won = winners(held(changes), facts(len(changes), truncate), KEY, ["a", "v", "b"])
    assert won is not None
    earlier = [(row["key"]["a"], row["key"]["b"]) for row in won.earlier.to_pylist()]
    assert sorted(earlier) == sorted(key for key, op in first.items() if op != "I")


def test_spark_folds_what_is_large() -> None:
    large = held([("U", "1", "1", "x" * (module._TEXT_BYTES + 1))])
    assert winners(large, facts(1), KEY, KEY) is None
    entry = StagedRows(TableId("public", "t"), "file:///none", 1, module._STAGED_BYTES + 1)
    entries = [LogEntry(0, entry, Lsn.ZERO, AT)]
    never_read = Batch(entries, Window(0, Lsn.ZERO), LOCAL)
    assert winners(never_read, facts(1), KEY, KEY) is None


def test_spark_folds_what_a_statement_couldnt_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    held_changes = held([("U", str(n), "1", "x" * 100) for n in range(100)])
    whole, partial = facts(100), replace(facts(100), unchanged=frozenset({"w"}))
    left_out = pa.array(['["w"]'] * 100, pa.string())
    place = held_changes.table.column_names.index("unchanged")
    lacking = Held(
        (), Window(0, Lsn.ZERO), LOCAL, held_changes.table.set_column(place, "unchanged", left_out)
    )
    monkeypatch.setattr(module, "_STATEMENT_BYTES", 20_000)
    assert winners(held_changes, whole, KEY, [*KEY, "v"]) is not None
    assert winners(lacking, partial, KEY, [*KEY, "v", "w"]) is None  # these are carried twice
    monkeypatch.setattr(module, "_STATEMENT_BYTES", 10_000)
    assert winners(held_changes, whole, KEY, [*KEY, "v"]) is None


def test_spark_folds_many_changes_that_left_columns_out(monkeypatch: pytest.MonkeyPatch) -> None:
    two = held([("U", "1", "1", "x"), ("U", "1", "1", "y")]).table
    two = two.set_column(2, "unchanged", pa.array(['["doc"]', None], pa.string()))
    batch = Held((), Window(0, Lsn.ZERO), LOCAL, two)
    some = replace(facts(2), unchanged=frozenset(["doc"]))
    assert winners(batch, some, KEY, [*KEY, "doc"]) is not None
    monkeypatch.setattr(module, "_ODD_CHANGES", 1)
    assert winners(batch, some, KEY, [*KEY, "doc"]) is None


def test_invariant_4_rows_outside_of_the_window_dont_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {
        "_op": pa.array(["I"] * 4).dictionary_encode().cast(STAGED_SCHEMA.field("_op").type),
        "_lsn": [1] * 4,
        "_commit_lsn": [5, 10, 15, 20],
        "_ts": pa.array([0] * 4, pa.timestamp("us", "UTC")),
        "_xid": [1] * 4,
        "_unchanged_cols": pa.nulls(4, pa.string()),
        "_data": pa.array([json.dumps({"id": str(i)}) for i in range(4)], pa.large_string()),
    }
    path = tmp_path / "staged.parquet"
    pq.write_table(pa.table(rows, STAGED_SCHEMA), path)
    entry = LogEntry(7, StagedRows(TableId("public", "t"), path.as_uri(), 4, 100), Lsn.ZERO, AT)
    batch = Batch([entry], Window(8, Lsn(10), Lsn(20)), LOCAL)
    found = batch.rows(10**6)
    assert found is not None
    assert found.to_pylist() == [
        {"off": 8, "op": "I", "unchanged": None, "data": '{"id": "1"}'},
        {"off": 9, "op": "I", "unchanged": None, "data": '{"id": "2"}'},
    ]
    entries = [replace(entry, start_offset=4 * number) for number in range(2, 40)]
    read: list[object] = []

    def counted(rows: StagedRows, *arguments: Any) -> pa.Table:
        read.append(rows)
        return reads(rows, *arguments)

    reads = StagedRows.read
    monkeypatch.setattr(StagedRows, "read", counted)
    whole = Batch(entries, Window(8, Lsn(0), Lsn(99)), LOCAL)
    assert whole.rows(100) is None  # as soon as it is known to be too much
    assert len(read) < 10
    found = whole.rows(10**6)
    assert found is not None
    assert found["off"].to_pylist() == list(range(8, 160))


def test_a_batch_keeps_no_rows_of_other_tables_that_share_its_files(tmp_path: Path) -> None:
    rows = {
        "_op": pa.array(["I"] * 2).dictionary_encode().cast(STAGED_SCHEMA.field("_op").type),
        "_lsn": [1] * 2,
        "_commit_lsn": [1] * 2,
        "_ts": pa.array([0] * 2, pa.timestamp("us", "UTC")),
        "_xid": [1] * 2,
        "_unchanged_cols": pa.nulls(2, pa.string()),
        "_data": pa.array(['{"id": "1"}', json.dumps({"id": "x" * 10**6})], pa.large_string()),
    }
    path = tmp_path / "shared.parquet"
    pq.write_table(pa.table(rows, STAGED_SCHEMA), path)
    small = StagedRows(TableId("public", "t"), path.as_uri(), 1, 50, first_row=0)
    entries = [LogEntry(number, small, Lsn.ZERO, AT) for number in range(50)]
    before = pa.total_allocated_bytes()
    found = Batch(entries, Window(0, Lsn.ZERO), LOCAL).rows(10**6)
    assert found is not None
    assert len(found) == 50
    assert pa.total_allocated_bytes() - before < 5 * 10**6
