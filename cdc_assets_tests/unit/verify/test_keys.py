"""Looking for keys that stand twice: what is found, and what it costs, on real Iceberg tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import Table

from cdc_assets.log.verified import KeysSeen
from cdc_assets.verify.keys import ROUND_EVERY, KeysLooked, look

NOW = datetime(2026, 1, 1, tzinfo=UTC)
FILES, ROWS = 10, 100


def rows(first: int, end: int) -> pa.Table:
    numbers = range(first, end)
    return pa.table(
        {
            "v": ["x"] * len(numbers),
            "day": [date(2020, 1, 1) + timedelta(days=n) for n in numbers],
            "id": pa.array(numbers, pa.int64()),
            "name": [f"{n:05d} and so on, longer than bounds are" for n in numbers],
        }
    )


@pytest.fixture
def new_table(tmp_path: Path) -> Callable[[], Table]:
    """A table of FILES files, of ROWS keys each, that follow one another."""

    def new() -> Table:
        catalog = SqlCatalog("c", uri=f"sqlite:///{tmp_path}/c.db", warehouse=tmp_path.as_uri())
        catalog.create_namespace("n")
        table = catalog.create_table("n.t", rows(0, 1).schema)
        for number in range(FILES):
            table.append(rows(number * ROWS, (number + 1) * ROWS))
        return table

    return new


def looked(table: Table, seen: KeysSeen | None, *key: str, **options: Any) -> KeysLooked:
    found = look(table, key or ["id"], seen, options.pop("now", NOW), **options)
    assert found is not None
    return found


def test_what_is_new_is_compared_with_the_files_that_may_have_its_keys(
    new_table: Callable[[], Table],
) -> None:
    table = new_table()
    first = looked(table, None)
    assert (first.duplicated, first.looked, first.read_rows) == (0, FILES, FILES * ROWS)
    assert first.seen.round_ended == NOW, "everything was new"
    assert looked(table, first.seen).read_rows == 0

    table.append(rows(5000, 5010))
    grown = looked(table, first.seen)
    assert (grown.changed, grown.meant, grown.read_rows) == (1, 0, 10)
    table.append(rows(250, 253))  # in an old file, too
    found = grown
    for key in (["id"], ["name"], ["day"], ["day", "name"]):
        found = looked(table, grown.seen, *key)
        assert (found.duplicated, found.rows, found.met) == (3, 6, 1), key
        assert found.read_rows == 3 + ROWS
        assert found.seen == grown.seen, "the next pass finds it again"
    table.append(rows(7000, 7001))
    assert looked(table, found.seen).duplicated == 3

    table.delete("id >= 250 and id < 253")
    well = looked(table, found.seen)
    assert (well.duplicated, well.seen.behind) == (0, 0)


def test_a_duplicate_of_two_new_files_is_found(new_table: Callable[[], Table]) -> None:
    table = new_table()
    seen = looked(table, None).seen
    table.append(rows(5000, 5002))
    table.append(rows(5001, 5003))
    found = looked(table, seen)
    assert (found.duplicated, found.rows, found.read_rows) == (1, 2, 4)


def test_a_round_finds_what_no_new_file_has(new_table: Callable[[], Table]) -> None:
    table = new_table()
    table.append(rows(250, 251))
    newest = looked(table, None).seen
    current = table.current_snapshot()
    assert current is not None
    # As if a row that was deleted came back: all of its files were looked at before.
    seen = KeysSeen(newest.lake_table, current.snapshot_id, (99, ""), 0, None, NOW)
    assert looked(table, seen).duplicated == 0
    later = NOW + ROUND_EVERY
    found = looked(table, seen, now=later, budget=2 * 5 * ROWS)
    assert (found.duplicated, found.turned, found.seen) == (1, 5, seen)
    table.delete("id = 250")
    shares = []
    while seen.round_ended == NOW:
        found = looked(table, seen, now=later, budget=2 * 5 * ROWS)
        assert found.read_rows <= 10 * ROWS
        shares.append(found.share)
        seen = found.seen
    assert shares == sorted(shares)
    assert len(shares) >= FILES // 5


def test_a_pass_costs_what_its_budget_allows_and_says_what_it_left_out(
    new_table: Callable[[], Table],
) -> None:
    table = new_table()
    seen = looked(table, None).seen
    everywhere = rows(0, FILES * ROWS).take(list(range(0, FILES * ROWS, ROWS // 2)))
    table.append(everywhere)
    found = looked(table, seen, budget=len(everywhere) + 3 * ROWS)
    assert (found.met, found.meant, found.read_rows) == (3, FILES, len(everywhere) + 3 * ROWS)
    assert found.duplicated == 6, "two keys of each file that was read"
    for number in range(4):
        table.append(rows(9000 + number * ROWS, 9000 + (number + 1) * ROWS))
    behind = looked(table, KeysSeen(seen.lake_table, 0, seen.new, 0, None, NOW), "v", budget=ROWS)
    assert (behind.changed, behind.looked) == (5, 1)


def test_what_was_found_by_chance_is_found_again(new_table: Callable[[], Table]) -> None:
    table = new_table()
    within = [number * ROWS + ROWS // 2 for number in range(FILES)]
    table.delete(f"id in ({', '.join(map(str, within[1:]))})")
    seen = looked(table, None).seen
    table.append(rows(0, FILES * ROWS).take(within))  # any file may have these keys, one has
    budget = FILES + 10 + 3 * ROWS  # what is looked for, what comes later, and three files
    passes = (replace(seen, round_ended=NOW - timedelta(seconds=n)) for n in range(100))
    begun = next(each for each in passes if looked(table, each, budget=budget).duplicated)
    for number in range(10):
        table.append(rows(9000 + number, 9001 + number))
        assert looked(table, begun, budget=budget).duplicated == 1
