"""Comparing every row of source and lake, each table at an LSN of its own.

A temporary slot gives a consistent point c and a snapshot that shows exactly what committed before
it. The log is applied up to c and no further (it is cut by commit LSN) under the table's writer
lock, which is given back as soon as the lake has a snapshot of that moment. Both sides are then
read as of c, and must hold the same rows, however busy the source is. One table is compared after
the other, so no more than one waits, and only for about as long as a merge takes.

A side's row becomes its key and a digest of its comparable text; a row that doesn't occur equally
often on both sides differs. That finds missing, surplus, changed and duplicate rows in one pass.
TRUNCATE isn't MVCC-safe: a table that gets a new file while it is read is compared again.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Literal

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from cdc_assets.errors import TableProblem, first_line
from cdc_assets.lake.publish import patiently
from cdc_assets.lake.tables import LakeTable
from cdc_assets.log.store import LogStore
from cdc_assets.log.verified import remember_compared, remember_missed
from cdc_assets.materializer.drain import drain
from cdc_assets.materializer.schema.ahead import Look
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.slots import current_lsn
from cdc_assets.readiness.foreign_errors import explained
from cdc_assets.verify.difference import balance
from cdc_assets.verify.key_names import key_names
from cdc_assets.verify.others import other_columns
from cdc_assets.verify.point import READ_AGAIN, moment, offset_of, passed, whole_at
from cdc_assets.verify.rows import Shape, as_of, comparable, lake_side, shapes, source_side
from cdc_assets.verify.source import LOST, REWRITTEN, count_source, read_source

# Attempts at a table that is truncated or altered while it is read.
ROUNDS = 10
Outcome = Literal["equal", "different", "not compared"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of comparing one table. ``keys`` names some that differ, ``columns`` where.

    ``problem``: why it wasn't compared, ``since`` when. ``lost``: by column, how many values of the
    source have no form in the lake; they are compared as the column's policy changes them.
    ``others``: remarks on columns that only the lake has.
    """

    table: TableId
    lsn: Lsn | None
    source_rows: int = 0
    lake_rows: int = 0
    differing: int = 0
    keys: tuple[str, ...] = ()
    problem: str | None = None
    seconds: float = 0.0
    columns: tuple[str, ...] = ()
    lost: Mapping[str, int] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    since: datetime | None = None

    @property
    def outcome(self) -> Outcome:
        if self.problem is not None:
            return "not compared"
        return "different" if self.differing else "equal"

    @property
    def remarks(self) -> list[str]:
        """Remarks on the table, even if it is equal."""
        lost = [
            f"{name}: {count:,} values have no form in the lake, and were compared as what"
            " columns.unrepresentable makes of them"
            for name, count in sorted(self.lost.items())
        ]
        return [*lost, *self.others]

    @property
    def equal(self) -> bool:
        return self.outcome == "equal"


def verify(
    pipeline: Pipeline,
    session: SparkSession,
    tables: Sequence[TableId],
    flush_to: Callable[[Lsn], None],
    on_progress: Callable[[str], None] = lambda _: None,
    *,
    show_keys: bool = False,
) -> list[Comparison]:
    """Compare ``tables``, one after the other; ``show_keys`` shows keys, too (``key_names``).

    ``flush_to`` returns once everything that committed below an LSN is registered. A table that
    can't be compared (its copy isn't complete, it is parked) is reported with its problem. One that
    is truncated or rewritten while it is read is compared again, at a later LSN.
    """
    if pipeline.config.snapshot.mode != "snapshot_only":
        with pipeline.connect_source("verify") as source:
            now = current_lsn(source)
        flush_to(now)  # so that no table waits for what is older than its own comparison
    found = []
    for number, table in enumerate(tables, 1):
        on_progress(f"{number} of {len(tables)}: {table}")
        found.append(_verified(pipeline, session, table, flush_to, on_progress, show_keys))
    return found


def _verified(
    pipeline: Pipeline,
    session: SparkSession,
    table: TableId,
    flush_to: Callable[[Lsn], None],
    on_progress: Callable[[str], None],
    show_keys: bool,
) -> Comparison:
    began, rounds = time.monotonic(), ROUNDS
    while True:
        rounds -= 1
        try:
            done = _compare(pipeline, session, table, flush_to, on_progress, show_keys)
        except _Again as again:
            if rounds:
                continue
            done = Comparison(table, None, problem=str(again))
        except Exception as problem:  # noqa: BLE001 - one table's, told; the others go on
            said = first_line(explained(problem, pipeline.config))
            done = Comparison(table, None, problem=said)
        break
    done = replace(done, seconds=time.monotonic() - began)
    if done.problem is not None:
        done = replace(done, since=remember_missed(pipeline.store, table))
    else:
        row = pipeline.store.copy_state(table)
        epoch = row.epoch if row is not None and done.differing else None
        remember_compared(pipeline.store, table, differs=epoch)
    on_progress(
        f"{table}: {done.source_rows:,} rows, {done.differing:,} differ"
        f" ({done.seconds:.1f} s) {done.problem or ''}".rstrip()
    )
    return done


class _Again(TableProblem):
    """The rows that were read aren't of one moment: they are read anew."""


def _compare(
    pipeline: Pipeline,
    session: SparkSession,
    table: TableId,
    flush_to: Callable[[Lsn], None],
    on_progress: Callable[[str], None],
    show_keys: bool,
) -> Comparison:
    """Raises CdcError where it can't be compared, _Again if it was truncated or altered."""
    offset = offset_of(comparable(pipeline, table).state())
    before = shapes(pipeline, [table])[table]
    follows = pipeline.config.snapshot.mode != "snapshot_only"
    with ExitStack() as cleanup:
        with moment(pipeline, "verify") as (point, snapshot_name):
            if follows:
                lake, snapshot_id = _applied(
                    pipeline, session, table, before, point, offset, flush_to
                )
            else:
                lake = comparable(pipeline, table)
                snapshot_id = lake.state().snapshot_id
            cleanup.enter_context(_kept(session, lake, snapshot_id))
            beside = as_of(session, lake, snapshot_id)
            on_progress(f"{table}: comparing at {point}")
            texts = read_source(pipeline, session, beside, snapshot_name).persist()
            cleanup.callback(texts.unpersist)
            read, lost = counted_texts(texts, beside.lake)
            counted = count_source(pipeline, beside, snapshot_name)
        if shapes(pipeline, [table])[table] != before:
            # A snapshot doesn't protect from TRUNCATE: the table looks empty to older ones, too.
            raise _Again(table, REWRITTEN)
        if counted != read:
            raise TableProblem(
                table, f"{read:,} rows of the source were read, and it counts {counted:,}"
            )
        name = key_names(pipeline, lake, asked=show_keys)
        found = balance(source_side(texts, beside), lake_side(beside), lake, name)
        return Comparison(
            table,
            point,
            found.source_rows,
            found.lake_rows,
            found.differing,
            found.keys,
            columns=found.columns,
            lost=lost,
            others=other_columns(beside),
        )


def _applied(
    pipeline: Pipeline,
    session: SparkSession,
    table: TableId,
    before: Shape,
    point: Lsn,
    offset: int,
    flush_to: Callable[[Lsn], None],
) -> tuple[LakeTable, int | None]:
    """The lake table with all that committed below ``point`` and nothing else, and its snapshot."""
    with _writing(pipeline.store, table):
        lake = comparable(pipeline, table)
        if passed(pipeline, table, point, offset, lake.state()):
            raise _Again(table, "its merges were faster than its comparison")
        flush_to(point)
        drain(pipeline, session, table, below=point, look=Look(before.told, point))
        lake = comparable(pipeline, table)
        if not whole_at(pipeline, table, point):
            raise _Again(table, READ_AGAIN)
        return lake, lake.state().snapshot_id


@contextmanager
def _kept(session: SparkSession, lake: LakeTable, snapshot_id: int | None) -> Iterator[None]:
    """Keep the snapshot from expiry: reading a large table takes longer than snapshots stay."""
    if snapshot_id is None:
        yield
        return
    tag = f"verify_{uuid.uuid4().hex[:8]}"
    patiently(
        session,
        f"alter table {lake.sql_name} create tag {tag} as of version {snapshot_id} retain 7 days",
    )
    try:
        yield
    finally:
        with suppress(PySparkException):  # expiry removes it then
            patiently(session, f"alter table {lake.sql_name} drop tag if exists {tag}")


@contextmanager
def _writing(store: LogStore, table: TableId) -> Iterator[None]:
    lock = f"write:{table}"
    store.lock(lock)
    try:
        yield
    finally:
        store.unlock(lock)


def counted_texts(texts: DataFrame, lake: LakeTable) -> tuple[int, dict[str, int]]:
    """The number of rows read and, by column, how many values have no form in the lake."""
    numbers = F.split(F.col(LOST), ",")
    counted = texts.agg(
        F.count(F.lit(1)),
        *(F.count_if(F.array_contains(numbers, str(c.source.number))) for c in lake.columns),
    ).collect()[0]
    lost = {c.name: counted[number] for number, c in enumerate(lake.columns, 1) if counted[number]}
    return counted[0], lost
