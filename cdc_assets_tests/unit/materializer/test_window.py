"""The next part of a log that one merge applies: where it is cut, and the cursor it leads to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from cdc_assets.log.cursors import Cursor
from cdc_assets.log.staged.files import STAGED_SCHEMA, StagedRows, relation_key
from cdc_assets.log.staged.storage import Storage
from cdc_assets.log.states import TableState
from cdc_assets.log.store import LogEntry
from cdc_assets.log.table_row import TableRow
from cdc_assets.materializer.window import NextWindow, next_window
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId

T, AT = TableId("public", "t"), datetime(2026, 1, 1, tzinfo=UTC)
ROW = TableRow(T, 1, 1, TableState.STREAMING, ("id",), (), Lsn(100), Lsn(100), None, None)
START = Cursor(0, Lsn(100))


def staged(
    folder: Path, start: int, rows: Sequence[tuple[str, int]], columns: Sequence[str] = ("id",)
) -> LogEntry:
    """An entry of ``rows`` (operation, commit LSN), whose relation has ``columns``."""
    moment = int(AT.timestamp() * 1e6)
    table = pa.table(
        [
            pa.array([op for op, _ in rows]).dictionary_encode(),
            [commit for _, commit in rows],
            [commit for _, commit in rows],
            [moment] * len(rows),
            [1] * len(rows),
            pa.nulls(len(rows), pa.string()),
            ['{"id":"1"}'] * len(rows),
        ],
        names=STAGED_SCHEMA.names,
    ).cast(STAGED_SCHEMA)
    relation = {"identity": "d", "columns": [[name, 23, -1, name == "id"] for name in columns]}
    path = folder / f"{start}.parquet"
    with pq.ParquetWriter(path, STAGED_SCHEMA) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({relation_key(None): json.dumps(relation).encode()})
    rows_of = StagedRows(T, path.as_uri(), len(rows), path.stat().st_size)
    return LogEntry(start, rows_of, Lsn(rows[-1][1] + 1), AT)


def cut(
    *entries: LogEntry,
    row: TableRow = ROW,
    cursor: Cursor = START,
    below: Lsn | None = None,
    batch_bytes: int = 2**30,
) -> NextWindow | None:
    return next_window(row, cursor, entries, Storage(), below=below, batch_bytes=batch_bytes)


def test_a_window_has_all_entries_of_one_relation(tmp_path: Path) -> None:
    before = [staged(tmp_path, 0, [("I", 110)]), staged(tmp_path, 1, [("I", 120), ("U", 130)])]
    after = staged(tmp_path, 3, [("I", 140)], ("id", "added"))
    found = cut(*before, after)
    assert found is not None
    assert (found.entries, found.facts.rows) == (before, 3)
    assert found.reached == Cursor(3, Lsn(131), AT)
    found = cut(after, cursor=found.reached)
    assert found is not None
    assert [column.name for column in found.relation.columns] == ["id", "added"]


def test_a_window_is_bounded_by_bytes_and_has_one_entry_at_least(tmp_path: Path) -> None:
    entries = [staged(tmp_path, n, [("I", 110 + n)]) for n in range(3)]
    found = cut(*entries, batch_bytes=1)
    assert found is not None
    assert found.entries == entries[:1]


def test_invariant_4_rows_that_the_copy_has_count_for_the_cursor_alone(tmp_path: Path) -> None:
    found = cut(staged(tmp_path, 0, [("I", 90), ("U", 99)]))
    assert found is not None
    assert (found.facts.rows, found.reached.offset) == (0, 2)


def test_a_comparison_cuts_within_an_entry_and_ends_where_none_is_below(tmp_path: Path) -> None:
    entry = staged(tmp_path, 0, [("I", 110), ("I", 120), ("I", 130)])
    found = cut(entry, below=Lsn(120))
    assert found is not None
    assert (found.facts.rows, found.reached) == (1, Cursor(1, Lsn(120), AT))
    assert cut(entry, cursor=found.reached, below=Lsn(120)) is None


def test_a_truncate_of_a_table_that_keeps_deleted_rows_is_a_window_of_its_own(
    tmp_path: Path,
) -> None:
    entry = staged(tmp_path, 0, [("I", 110), ("T", 120), ("I", 130)])
    row = replace(ROW, mode="soft_delete")
    cursor, ends = START, []
    while cursor.offset < entry.end_offset:
        found = cut(entry, row=row, cursor=cursor)
        assert found is not None
        cursor = found.reached
        ends.append((cursor.offset, cursor.applied_lsn, found.facts.rows))
    assert ends == [(1, Lsn(100), 1), (2, Lsn(100), 1), (3, Lsn(131), 1)]


def test_a_comparison_that_cuts_within_an_entry_leaves_its_rest_whatever_follows(
    tmp_path: Path,
) -> None:
    entries = [
        staged(tmp_path, 0, [("I", 110)]),
        staged(tmp_path, 1, [("I", 120), ("I", 130), ("I", 140)]),
        staged(tmp_path, 4, [("I", 150)]),
        staged(tmp_path, 5, [("I", 160)]),
    ]
    found = cut(*entries, below=Lsn(130))
    assert found is not None
    assert (found.facts.rows, found.reached.offset) == (2, 2)
    assert found.entries == entries[:2]  # no other is read, or waited for
    assert cut(*entries[1:], cursor=found.reached, below=Lsn(130)) is None
    found = cut(*entries[1:], cursor=found.reached)
    assert found is not None
    assert (found.facts.rows, found.reached.offset) == (4, 6)
