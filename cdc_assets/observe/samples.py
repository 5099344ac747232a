"""Samples of a source's state: a row a minute, for a day.

The rows are for people to look at; nothing is decided by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

from cdc_assets.log.store import LogStore
from cdc_assets.log.tables import GROUP
from cdc_assets.observe.status import SourceStatus

EVERY_SECONDS = 60.0
_KEPT = "1 day"

# Of several who sample at once only one inserts.
_INSERT = f"""
insert into health_samples (source, lag_seconds, lag_bytes, retained_bytes, pending_rows,
                            rows_staged, rows_applied)
select %(source)s, %(lag_seconds)s, %(lag_bytes)s, %(retained)s, %(pending)s,
       (select coalesce(sum(next_offset), 0) from log_seq where source = %(source)s),
       (select coalesce(sum("offset"), 0) from mat_cursor
         where source = %(source)s and consumer_group = %(group)s)
 where not exists (select from health_samples where source = %(source)s
                   and taken_at > clock_timestamp() - interval '{EVERY_SECONDS * 0.9} seconds')
"""


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment. Lags are the worst of all tables; None while nothing is copied.

    ``rows_staged`` and ``rows_applied`` are totals since the beginning.
    """

    at: datetime
    lag_seconds: float | None
    lag_bytes: int | None
    retained_bytes: int
    pending_rows: int
    rows_staged: int
    rows_applied: int


def take(store: LogStore, found: SourceStatus) -> None:
    """Add a row, unless the last one is younger than a minute; forget what is older than a day."""
    tables = [table for table in found.tables if table.lag_seconds is not None]
    store.connection.execute(
        _INSERT.encode(),
        {
            "source": store.source,
            "group": GROUP,
            "lag_seconds": max((t.lag_seconds or 0.0 for t in tables), default=None),
            "lag_bytes": max((t.lag_bytes or 0 for t in tables), default=None),
            "retained": found.retained_bytes,
            "pending": sum(table.pending_rows for table in found.tables),
        },
    )
    store.connection.execute(
        "delete from health_samples where source = %s"
        " and taken_at < clock_timestamp() - %s::interval",
        (store.source, _KEPT),
    )


def history(store: LogStore) -> list[Sample]:
    """Every sample that is kept, the oldest first."""
    rows = store.connection.execute(
        "select taken_at, lag_seconds, lag_bytes, coalesce(retained_bytes, 0), pending_rows,"
        " rows_staged, rows_applied from health_samples where source = %s order by taken_at",
        (store.source,),
    ).fetchall()
    return [Sample(*row) for row in rows]


def applied_per_second(samples: Sequence[Sample]) -> list[tuple[datetime, float]]:
    """How many changes a second were applied between each sample and the one before."""
    return [
        (b.at, max(0, b.rows_applied - a.rows_applied) / (b.at - a.at).total_seconds())
        for a, b in pairwise(samples)
        if b.at > a.at
    ]
