"""Totals of the work done for a source, by whatever process: the rows of ``work_done``.

They only rise, so that a rate can be made of them. Work is counted by the statement that records
it, where there is one: it costs no round trip, and what is recorded once is counted once. Whoever
dies between its commit in the lake and that statement isn't counted.

A source has one row of a kind, which all its processes write. So it is the last row that a
statement locks, and no transaction goes on with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, LiteralString

import psycopg

KINDS = ("copy", "merge", "maintenance")
"""copy: a chunk that landed. merge: a commit to a lake table. maintenance: a table's care."""
OUTCOMES = ("done", "failed")

_COLUMNS: LiteralString = "(source, kind, outcome, count, rows, bytes, seconds)"
_ADD: LiteralString = (
    " on conflict (source, kind, outcome) do update set"
    " count = w.count + excluded.count, rows = w.rows + excluded.rows,"
    " bytes = w.bytes + excluded.bytes, seconds = w.seconds + excluded.seconds,"
    " ended_at = clock_timestamp()"
)


@dataclass(frozen=True, slots=True)
class Work:
    """Work of one kind; ``bytes`` of what was read for it, or removed by maintenance."""

    kind: str
    outcome: str = "done"
    count: int = 1
    rows: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def parameters(self) -> dict[str, Any]:
        """Of :data:`GIVEN`."""
        return {
            "work_kind": self.kind,
            "work_outcome": self.outcome,
            "work_count": self.count,
            "work_rows": self.rows,
            "work_bytes": self.bytes,
            "work_seconds": self.seconds,
        }


NO_WORK = Work("merge", count=0)

GIVEN: LiteralString = (
    "%(work_kind)s::text, %(work_outcome)s::text, %(work_count)s::bigint, %(work_rows)s::bigint,"
    " %(work_bytes)s::bigint, %(work_seconds)s::float8"
)
"""What :func:`adding` adds: :meth:`Work.parameters`."""


def adding(which: LiteralString) -> LiteralString:
    """A statement that adds ``which``: a query's text after ``select``, without the source."""
    return f"insert into work_done as w {_COLUMNS} select %(source)s, {which}{_ADD}"


def add(connection: psycopg.Connection[Any], source: str, work: Work) -> None:
    connection.execute(adding(GIVEN), {"source": source, **work.parameters()})


@contextmanager
def failures_counted(
    connection: psycopg.Connection[Any], source: str, kind: str, *but: type[Exception]
) -> Iterator[None]:
    """Count an error of the block, except those of ``but``, and raise it."""
    try:
        yield
    except but:
        raise
    except Exception:
        with suppress(psycopg.Error):  # what went wrong matters more
            add(connection, source, Work(kind, "failed"))
        raise


def totals(connection: psycopg.Connection[Any], source: str) -> list[Work]:
    """Of each kind and outcome, also of those that nothing was done of."""
    rows = connection.execute(
        "select kind, outcome, count, rows, bytes, seconds from work_done where source = %s",
        (source,),
    ).fetchall()
    known = {(kind, outcome): Work(kind, outcome, *rest) for kind, outcome, *rest in rows}
    return [
        known.get((kind, outcome), Work(kind, outcome, 0)) for kind in KINDS for outcome in OUTCOMES
    ]
