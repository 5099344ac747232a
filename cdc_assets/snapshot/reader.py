"""What a Spark task does: read chunks by ADBC under an exported snapshot and hand over Arrow.

A task drains several chunks over one connection, in one repeatable-read transaction that imported
the snapshot, so that every chunk of a copy shows the same moment. ADBC fetches with COPY in binary,
which is 0.5 to 1 µs of CPU a row. What each chunk cost is written to ``snapshot_progress`` at once,
for the people who watch.

This module runs inside Spark's Python workers: it imports pyarrow and ADBC only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

# Days and microseconds of 0001-01-01 and 9999-12-31T23:59:59.999999, the range of Spark's calendar.
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896
_DAY_US = 86_400_000_000
_FIRST_US, _LAST_US = _FIRST_DAY * _DAY_US, (_LAST_DAY + 1) * _DAY_US - 1
# Infinity is the largest integer, counted from 2000; ADBC counts from 1970, 10,957 days earlier,
# and wraps around. No date of Postgres's is as early as what comes out.
_INFINITE_DAY = 2**31 - 1 + 10_957 - 2**32
_INFINITE_US = 2**63 - 1 + 10_957 * _DAY_US - 2**64


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """All that a task needs to read its chunks.

    ``select`` ends where the chunk's predicate follows. ``tasks[i]`` are the ``(key, predicate)``
    of task i's chunks. ``policies`` say, by column, what happens to dates and times that don't fit.
    ``progress`` is an UPDATE with the parameters rows, bytes, seconds and chunk key, or empty.
    """

    source_uri: str
    snapshot_name: str
    select: str
    tasks: tuple[tuple[tuple[str, str], ...], ...]
    schema: pa.Schema
    policies: tuple[tuple[str, str], ...]
    log_uri: str
    progress: str


def chunk_reader(
    plan: ReadPlan,
) -> Callable[[Iterable[pa.RecordBatch]], Iterable[pa.RecordBatch]]:
    """For ``mapInArrow`` over task numbers: yields the rows of each task's chunks."""

    def read(tasks: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import adbc_driver_postgresql.dbapi as adbc

        numbers = [number for batch in tasks for number in batch.column(0).to_pylist()]
        with (
            adbc.connect(plan.source_uri, autocommit=True) as source,
            adbc.connect(plan.log_uri, autocommit=True) as log,
            source.cursor() as rows,
            log.cursor() as progress,
        ):
            rows.execute("begin isolation level repeatable read read only")
            rows.execute(f"set transaction snapshot '{plan.snapshot_name}'")
            for number in numbers:
                for key, predicate in plan.tasks[number]:
                    began, count, size = time.monotonic(), 0, 0
                    rows.execute(f"{plan.select} where {predicate}")
                    for batch in rows.fetch_record_batch():
                        count, size = count + batch.num_rows, size + batch.nbytes
                        yield fit(batch, plan.schema, dict(plan.policies))
                    if plan.progress:
                        seconds = time.monotonic() - began
                        progress.execute(plan.progress, (count, size, seconds, key))

    return read


def fit(batch: pa.RecordBatch, schema: pa.Schema, policies: dict[str, str]) -> pa.RecordBatch:
    """Give a batch exactly ``schema``: widths as in the lake, the calendar as in Spark.

    Raises pa.ArrowInvalid naming the column where policy ``fail`` meets a value that doesn't fit.
    """
    columns = []
    for position, field in enumerate(schema):
        values = batch.column(position)
        policy = policies.get(field.name)
        if policy is not None:
            values = _fit_calendar(values, field, policy)
        if values.type != field.type:
            values = values.cast(field.type)
        columns.append(values)
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _fit_calendar(values: pa.Array, field: pa.Field, policy: str) -> pa.Array:
    days = pa.types.is_date32(field.type)
    raw = values.view(pa.int32() if days else pa.int64())
    low, high = (_FIRST_DAY, _LAST_DAY) if days else (_FIRST_US, _LAST_US)
    extent = pc.min_max(raw)
    smallest, largest = extent["min"].as_py(), extent["max"].as_py()
    if smallest is None or (smallest >= low and largest <= high):
        return values
    if policy == "fail":
        raise pa.ArrowInvalid(
            f"column {field.name}: a value is outside the years 1 to 9999, or infinite"
        )
    inside = pc.and_(pc.greater_equal(raw, low), pc.less_equal(raw, high))
    if policy == "clamp":
        bounds = [pa.scalar(bound, raw.type) for bound in (low, high)]
        infinite = pa.scalar(_INFINITE_DAY if days else _INFINITE_US, raw.type)
        raw = pc.if_else(pc.equal(raw, infinite), bounds[1], raw)
        clamped = pc.max_element_wise(raw, bounds[0], skip_nulls=False)
        return pc.min_element_wise(clamped, bounds[1], skip_nulls=False).view(values.type)
    return pc.if_else(inside, raw, pa.scalar(None, raw.type)).view(values.type)
