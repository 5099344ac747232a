"""What a difference between the heaps of a table and those it had means: pure judgements."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cdc_assets.errors import TableProblem
from cdc_assets.log.heaps.record import (
    HeapFile,
    HeapTrace,
    KnownHeaps,
    Moment,
    Verdict,
    difference,
    judge,
)
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId

TABLE = TableId("public", "t")
KNOWN = KnownHeaps(
    {1: HeapFile(10, "5 "), 2: HeapFile(20, "5 ")}, Moment(700, Lsn(100)), pending=Lsn(200)
)
NEW = HeapTrace("public.t_1", False, False, False, 750, False)


def judged(
    now: dict[int, int] | dict[int, HeapFile],
    *traces: HeapTrace,
    known: KnownHeaps = KNOWN,
    flushed: int = 300,
    history: bool = False,
) -> Verdict | str:
    """``traces``: of the heaps that came or have another file, by oid. A problem as its code."""
    files = {o: HeapFile(file, "5 ") if isinstance(file, int) else file for o, file in now.items()}
    found = difference(known.files, files)
    by_oid = dict(zip(sorted(found.replaced | found.came), traces, strict=True))
    verdict = judge(
        TABLE,
        known,
        found,
        by_oid,
        keeps_history=history,
        flushed=Lsn(flushed) if flushed else None,
    )
    return verdict.what.split()[1].rstrip(":") if isinstance(verdict, TableProblem) else verdict


def test_a_file_with_rows_from_before_was_copied() -> None:
    assert judged({1: 11, 2: 20}, replace(NEW, kept=True)) == "harmless"
    assert judged({1: 11, 2: 20}, NEW) == "rows_replaced"


def test_an_alter_table_that_rewrites_one_heap_rewrites_all() -> None:
    altered = replace(NEW, altered=True)
    assert judged({1: 11, 2: 21}, altered, altered) == "harmless"
    # It was truncated, and a column was added, which rewrites nothing.
    assert judged({1: 11, 2: 20}, altered) == "rows_replaced"
    # The one that isn't the ALTER TABLE's.
    assert judged({1: 11, 2: 21}, altered, NEW) == "rows_replaced"


@pytest.mark.parametrize("flushed", [0, 199])
def test_what_the_log_may_still_explain_waits(flushed: int) -> None:
    assert judged({1: 11, 2: 20}, NEW, flushed=flushed) == "undecided"
    assert judged({1: 11, 2: 20}, NEW, known=replace(KNOWN, pending=None)) == "undecided"


def test_a_truncate_in_the_log_explains_all_heaps_at_once_and_no_single_one() -> None:
    truncated = replace(KNOWN, truncated=Lsn(150))
    both = {1: 11, 2: 21}
    assert judged(both, NEW, NEW, known=truncated) == "harmless"
    assert judged({1: 11, 2: 20}, NEW, known=truncated) == "rows_replaced"
    # One of them was truncated once more, by itself.
    assert judged(both, NEW, replace(NEW, changed_by=751), known=truncated) == "rows_replaced"
    # All were, by themselves in one transaction: the log has none, or one from before.
    assert judged(both, NEW, NEW) == "rows_replaced"
    assert judged(both, NEW, NEW, known=replace(KNOWN, truncated=Lsn(100))) == "rows_replaced"


def test_a_table_without_rows_is_as_good_as_copied() -> None:
    nothing = replace(NEW, empty=True)
    assert judged({1: 11, 2: 21}, nothing, nothing) == "empty"
    assert judged({1: 11, 2: 20}, nothing) == "rows_replaced"  # the other one may have some


def test_a_heap_that_came_counts_if_it_had_rows() -> None:
    came = {1: 10, 2: 20, 3: 30}
    assert judged(came, NEW) == "harmless"
    assert judged(came, replace(NEW, loaded=True)) == "partition_attached"


def test_a_heap_that_left_took_rows_along_but_not_from_a_history() -> None:
    assert judged({1: 10}) == "partition_left"
    assert judged({1: 10}, history=True) == "harmless"
    assert judged({}, history=True) == "harmless"


def test_a_heap_that_left_and_came_again_counts_as_both() -> None:
    again = {1: HeapFile(10, "5 "), 2: HeapFile(20, "9 ")}
    assert judged(again, NEW) == "partition_left"
    assert judged(again, NEW, history=True) == "harmless"
    assert judged(again, replace(NEW, loaded=True), history=True) == "partition_attached"
    unknown = replace(KNOWN, files={1: HeapFile(10), 2: HeapFile(20)})
    assert judged(again, known=unknown) == "harmless"
