"""What the history of a table says of its cursor, on real Iceberg tables without a server."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import Table

from cdc_assets.lake.lineage import cursor_properties, foreign_change, may_have_rows, position
from cdc_assets.log.cursors import Cursor
from cdc_assets.postgres.lsn import Lsn

ROWS = pa.table({"id": [1, 2, 3]})


@pytest.fixture
def table(tmp_path: Path) -> Table:
    catalog = SqlCatalog("c", uri=f"sqlite:///{tmp_path}/c.db", warehouse=f"file://{tmp_path}")
    catalog.create_namespace("n")
    return catalog.create_table("n.t", ROWS.schema)


def ours(table: Table, offset: int, rows: pa.Table = ROWS) -> None:
    table.append(rows, snapshot_properties=cursor_properties(Cursor(offset, Lsn(offset)), 2))


def expire_all(table: Table) -> None:
    current = table.metadata.current_snapshot_id
    gone = [s.snapshot_id for s in table.metadata.snapshots if s.snapshot_id != current]
    table.maintenance.expire_snapshots().by_ids(gone).commit()


def test_no_commit_says_it(table: Table) -> None:
    assert position(table) is None
    table.append(ROWS)
    assert position(table) is None


def test_the_newest_that_says_it_is_right(table: Table) -> None:
    ours(table, 5)
    ours(table, 8)
    found = position(table)
    assert found is not None
    assert (found.cursor, found.epoch, found.foreign) == (Cursor(8, Lsn(8)), 2, None)
    assert found.at_head
    assert found.sequence == 2


def test_the_first_commit_of_others_that_changed_rows_is_told(table: Table) -> None:
    ours(table, 5)
    table.append(ROWS.slice(0, 0))  # of no rows
    found = position(table)
    assert found is not None and (found.foreign, found.at_head) == (None, False)
    table.delete("id = 2")
    first = table.metadata.current_snapshot_id
    table.append(ROWS)
    found = position(table)
    assert found is not None and found.cursor.offset == 5
    assert f"snapshot {first} (overwrite, " in str(found.foreign)


def test_what_others_changed_is_carried_on(table: Table) -> None:
    ours(table, 5)
    said = cursor_properties(Cursor(8, Lsn(8)), 2, "snapshot 1 (append)")
    table.append(ROWS, snapshot_properties=said)
    found = position(table)
    assert found is not None and found.foreign == "snapshot 1 (append)"


def test_snapshots_that_others_expired_are_in_older_metadata(table: Table) -> None:
    ours(table, 5)
    table.append(ROWS)
    table.append(ROWS.slice(0, 0))
    expire_all(table)
    found = position(table)
    assert found is not None
    assert found.cursor.offset == 5
    assert "(append, " in str(found.foreign)  # it is between the two
    for entry in table.metadata.metadata_log:
        Path(entry.metadata_file.removeprefix("file://")).unlink()
    assert position(table) is None


def test_commits_of_a_copy_are_known_by_what_they_say(table: Table) -> None:
    table.append(ROWS, snapshot_properties={"mine": "1"})
    assert foreign_change(table, ours="mine") is None
    table.append(ROWS)
    assert "(append, " in str(foreign_change(table, ours="mine"))


def test_a_total_that_is_wrong_or_missing_does_not_make_a_table_empty(table: Table) -> None:
    assert not may_have_rows(table)
    table.append(ROWS)
    current = table.current_snapshot()
    assert current is not None and current.summary is not None
    current.summary["total-records"] = "0"
    assert may_have_rows(table)
    table.delete("id > 0")
    assert not may_have_rows(table)
