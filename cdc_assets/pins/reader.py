"""Reading ranges of pages under an exported snapshot, by ADBC, as Arrow.

ADBC fetches with COPY in binary, which is 0.5 to 1 µs of CPU a row. A transaction lasts for a few
chunks only: the table's lock is released in between, so that an ALTER TABLE needn't wait for the
end of a large table's copy.

This module runs inside Spark's Python workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pyarrow as pa
from psycopg import sql
from pyspark.sql import DataFrame, SparkSession

from cdc_assets.postgres.session.connect import NO_NEW_TIMEOUTS

Read = Callable[[str], Iterator[pa.RecordBatch]]
"""Runs a query in the open transaction and yields its batches."""


class ReadFailed(Exception):
    """The server ended a query half-way; the message is the server's, without its SQL state."""


@contextmanager
def snapshot_reader(uri: str) -> Iterator[Callable[[str], _Transaction]]:
    """Yields a function that opens a transaction under a snapshot; its first call connects."""
    import adbc_driver_postgresql.dbapi as adbc

    with ExitStack() as stack:
        connected: list[object] = []

        def open_transaction(snapshot_name: str) -> _Transaction:
            if not connected:
                source = stack.enter_context(adbc.connect(uri, autocommit=True))
                cursor = stack.enter_context(source.cursor())
                cursor.execute(NO_NEW_TIMEOUTS)
                connected.append(cursor)
            return _Transaction(connected[0], snapshot_name)

        yield open_transaction


class _Transaction:
    """A read-only transaction under the snapshot."""

    def __init__(self, cursor: object, snapshot_name: str) -> None:
        self._cursor = cursor
        self._name = snapshot_name

    def __enter__(self) -> Read:
        self._run("begin isolation level repeatable read read only")
        try:
            name = sql.Literal(self._name).as_string(None)
            self._run(f"set transaction snapshot {name}")
        except BaseException:
            self._run("rollback")
            raise
        return self._read

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._run("commit" if kind is None else "rollback")

    def _run(self, statement: str) -> None:
        self._cursor.execute(statement)  # type: ignore[attr-defined]

    def _read(self, query: str) -> Iterator[pa.RecordBatch]:
        self._run(query)
        batches = iter(self._cursor.fetch_record_batch())  # type: ignore[attr-defined]
        while True:
            try:
                batch = next(batches, None)
            except (OSError, pa.ArrowException) as error:
                raise ReadFailed(str(error)) from error
            if batch is None:
                return
            yield batch
            del batch  # not kept while the next one, which may be one large value, is received


OpenTransaction = Callable[[str], _Transaction]
"""Begins a transaction under the snapshot of that name, as a context."""


@dataclass(frozen=True, slots=True)
class TextPlan:
    """Queries whose columns are all text, dealt out to tasks."""

    uri: str
    snapshot_name: str
    tasks: tuple[tuple[str, ...], ...]
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
                        for batch in run(query):
                            yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)

    tasks = len(plan.tasks)
    return session.range(0, tasks, 1, tasks).mapInArrow(read, ddl)


def share(items: Iterable[str], tasks: int) -> tuple[tuple[str, ...], ...]:
    """Deal items out to ``tasks`` tasks in turn, so that the tasks end close together."""
    listed = tuple(items)
    return tuple(listed[number::tasks] for number in range(tasks))
