"""Comparing two lakes of one source at a mark, table by table."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pyspark.sql import SparkSession

from cdc_assets.errors import CdcError, TableProblem, first_line
from cdc_assets.lake.spark.session import lost_server
from cdc_assets.marks.diff.columns import columns_of
from cdc_assets.marks.diff.rows import Rows, cells, compare_rows
from cdc_assets.marks.diff.sides import NoMark, Side
from cdc_assets.postgres.names import TableId
from cdc_assets.readiness.foreign_errors import explained
from cdc_assets.verify.key_names import NameKey, hashed, salt
from cdc_assets.verify.rows import Beside, present

Outcome = Literal["equal", "different", "no mark", "not compared"]


@dataclass(frozen=True, slots=True)
class Difference:
    """A table of two lakes. ``schema``: differences of its columns; ``remarks``: none of those.

    ``rows``: None where they weren't compared; ``problem``: why.
    """

    table: TableId
    outcome: Outcome
    rows: Rows | None = None
    schema: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    problem: str | None = None
    seconds: float = 0.0


def compare(
    blue: Side,
    green: Side,
    sessions: tuple[SparkSession, SparkSession],
    tables: Sequence[TableId],
    on_progress: Callable[[str], None] = lambda _: None,
    *,
    show_keys: bool = False,
) -> list[Difference]:
    """Compare ``tables`` at the mark; ``sessions``: of blue and of green, on one server."""
    secret, found = salt(blue.store), list[Difference]()
    for number, table in enumerate(tables, 1):
        began = time.monotonic()
        head = f"{number} of {len(tables)}: {table}"
        try:
            ends = [
                _end(side, session, table)
                for side, session in zip((blue, green), sessions, strict=True)
            ]
            if ends[0] is None or ends[1] is None:
                done = _alone(table, blue, green)
            else:
                (mine, rows), (theirs, their_rows) = ends[0], ends[1]
                on_progress(f"{head}: reading {rows:,} and {their_rows:,} rows")
                shown = show_keys or (blue.config.verify.show_keys and bool(mine.lake.key))
                done = _compared(table, mine, theirs, _names(secret, table, shown=shown))
        except NoMark as lacking:
            done = Difference(table, "no mark", problem=lacking.what)
        except Exception as problem:  # one table's, told; the others go on
            if lost_server(problem):
                raise
            said = first_line(explained(problem, blue.config))
            done = Difference(table, "not compared", problem=said)
        found.append(replace(done, seconds=time.monotonic() - began))
        on_progress(f"{head}: {done.outcome} ({found[-1].seconds:.1f} s)")
    return found


def _end(side: Side, session: SparkSession, table: TableId) -> tuple[Beside, int] | None:
    """A side's rows at the mark, if it has the table; its errors are told by its own settings."""
    try:
        return side.at_mark(session, table) if table in side.tables else None
    except Exception as problem:
        if isinstance(problem, CdcError) or lost_server(problem):
            raise
        told = explained(problem, side.config)
        raise TableProblem(table, f"{side.name}: {told.what}", told.remedy) from problem


def _names(secret: str, table: TableId, *, shown: bool) -> NameKey:
    def name(key: str) -> str:
        called = hashed(secret, table, key)
        return f"{called} {key}" if shown else called

    return name


def _alone(table: TableId, blue: Side, green: Side) -> Difference:
    if table not in blue.tables and table not in green.tables:
        raise NoMark(table, "neither had it in its configuration at the mark")
    there = blue if table in blue.tables else green
    return Difference(table, "different", schema=(f"the table is in {there.name} only",))


def _compared(table: TableId, blue: Beside, green: Beside, name: NameKey) -> Difference:
    try:
        columns = columns_of(blue, green)
    except TableProblem as problem:  # of their columns: that is a difference
        return Difference(table, "different", problem=problem.what)
    frames = [
        cells(present(side.rows, side.lake, side.rows), texts)
        for side, texts in ((blue, columns.blue), (green, columns.green))
    ]
    rows = compare_rows(columns.lake, frames[0], frames[1], name)
    differs = rows.differing or columns.different
    return Difference(
        table, "different" if differs else "equal", rows, columns.different, columns.remarks
    )
