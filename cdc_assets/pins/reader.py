"""Reading ranges of pages under an exported snapshot, or under one of the moment, as Arrow.

A transaction lasts for a few chunks only: the table's lock is released in between, so that an ALTER
TABLE needn't wait for the end of a large table's copy.

This module runs inside Spark's Python workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psycopg
import pyarrow as pa
from psycopg import sql
from pyspark.sql import DataFrame, SparkSession

from cdc_assets.masks import Mask
from cdc_assets.postgres.copy_out.kinds import TEXT, Kind
from cdc_assets.postgres.session.connect import NO_NEW_TIMEOUTS

if TYPE_CHECKING:
    from cdc_assets.postgres.copy_out.session import Session

Read = Callable[[str, Sequence[Kind]], Iterator[pa.RecordBatch]]
"""Runs a SELECT, whose columns are of these kinds, in the open transaction; yields its batches."""


@contextmanager
def snapshot_reader(uri: str) -> Iterator[OpenTransaction]:
    """Yields a function that opens a transaction under a snapshot; it connects if it has to."""
    from cdc_assets.postgres.copy_out.session import open_session  # its loops are compiled

    opened: list[Session] = []

    def open_transaction(snapshot_name: str | None) -> _Transaction:
        if not opened or opened[-1].closed:
            opened[:] = [open_session(uri)]  # a closed one would keep its buffer
            opened[-1].execute(NO_NEW_TIMEOUTS)
        return _Transaction(opened[-1], snapshot_name)

    try:
        yield open_transaction
    finally:
        for session in opened:
            session.close()


class _Transaction:
    """A read-only transaction under the snapshot; None: under one of its first query's moment."""

    def __init__(self, session: Session, snapshot_name: str | None) -> None:
        self._session = session
        self._name = snapshot_name

    def __enter__(self) -> Read:
        self._session.execute("begin isolation level repeatable read read only")
        try:
            if self._name is not None:
                name = sql.Literal(self._name).as_string(None)
                self._session.execute(f"set transaction snapshot {name}")
        except BaseException:
            self._roll_back()
            raise
        return self._session.read

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._roll_back()
        elif not self._session.closed:  # as it is once a read was left before its end
            self._session.execute("commit")

    def _roll_back(self) -> None:
        """Whatever comes of it, what went wrong before is what is told."""
        with suppress(psycopg.Error):
            if not self._session.closed:  # else the server does
                self._session.execute("rollback")


OpenTransaction = Callable[[str | None], _Transaction]
"""Begins a transaction under the snapshot of that name (None: of now), as a context."""


@dataclass(frozen=True, slots=True)
class TextQuery:
    """A SELECT whose columns are all text; ``masks``: of some of them, by position."""

    text: str
    masks: tuple[tuple[int, Mask], ...] = ()

    def masked(self, columns: Sequence[pa.Array]) -> list[pa.Array]:
        masks = dict(self.masks)
        return [masks[i].array(v) if i in masks else v for i, v in enumerate(columns)]


@dataclass(frozen=True, slots=True)
class TextPlan:
    """Queries for the same columns, dealt out to tasks."""

    uri: str
    snapshot_name: str
    tasks: tuple[tuple[TextQuery, ...], ...]
    columns: tuple[str, ...]


def read_texts(session: SparkSession, plan: TextPlan) -> DataFrame:
    """The rows of all queries as a DataFrame of strings; one Spark task for each of the plan's."""
    ddl = ", ".join(f"{name} string" for name in plan.columns)
    schema = pa.schema([pa.field(name, pa.string()) for name in plan.columns])

    def read(numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with snapshot_reader(plan.uri) as open_transaction:
            for number in [n for batch in numbers for n in batch.column(0).to_pylist()]:
                for query in plan.tasks[number]:
                    # A transaction each: in between the table's lock is released.
                    with open_transaction(plan.snapshot_name) as run:
                        for batch in run(query.text, [TEXT] * len(schema)):
                            columns = query.masked(batch.columns)
                            yield pa.RecordBatch.from_arrays(columns, schema=schema)

    tasks = len(plan.tasks)
    return session.range(0, tasks, 1, tasks).mapInArrow(read, ddl)


def share(items: Iterable[TextQuery], tasks: int) -> tuple[tuple[TextQuery, ...], ...]:
    """Deal items out to ``tasks`` tasks in turn, so that the tasks end close together."""
    listed = tuple(items)
    return tuple(listed[number::tasks] for number in range(tasks))
