"""Whether a table's log goes on where its lake table ends."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from cdc_assets.lake.standing import gap
from cdc_assets.log.staged.files import StagedRows
from cdc_assets.log.store import LogEntry
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId

T = TableId("public", "t")


def log(*spans: tuple[int, int]) -> list[LogEntry]:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    return [
        LogEntry(start, StagedRows(T, f"{start}", end - start, 1), Lsn(end), at)
        for start, end in spans
    ]


@pytest.mark.parametrize(
    ("spans", "offset", "end"),
    [
        ([], 0, 0),
        ([], 7, 7),
        ([(0, 5), (5, 9)], 0, 9),
        ([(0, 5), (5, 9)], 3, 9),  # half-way through an entry
        ([(5, 9), (9, 12)], 5, 9),  # one came since the end was asked for
    ],
)
def test_a_log_that_goes_on(spans: list[tuple[int, int]], offset: int, end: int) -> None:
    assert gap(log(*spans), offset, end) is None


@pytest.mark.parametrize(
    ("spans", "offset", "end", "said"),
    [
        ([(5, 9)], 4, 9, "follows offset 4 is gone"),
        ([(0, 5), (6, 9)], 0, 9, "follows offset 5 is gone"),
        ([(0, 5)], 0, 9, "follows offset 5 is gone"),
        ([], 3, 9, "follows offset 3 is gone"),
        ([], 9, 3, "log ends at 3"),
    ],
)
def test_a_log_with_a_gap(spans: list[tuple[int, int]], offset: int, end: int, said: str) -> None:
    assert said in (gap(log(*spans), offset, end) or "")
