"""One look at the coordination database: a source's tables, work, pins and care, for its metrics.

It asks neither the source nor Spark, and its statements are six, however many tables there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cdc_assets.log.asked.wishes import paused
from cdc_assets.log.figures.work import Work, totals
from cdc_assets.log.groups.standing import GroupStatus, groups
from cdc_assets.log.states import SETTLED
from cdc_assets.log.store import LogStore
from cdc_assets.observe.figures.rows import TableFacts, table_rows
from cdc_assets.postgres.lsn import Lsn

PIN_KINDS = ("snapshot", "incremental")
"""snapshot: sessions hold it for its copies. incremental: they are read in short transactions."""

_PINS = """
select case when p.held then 'snapshot' else 'incremental' end, count(*),
       extract(epoch from clock_timestamp() - min(p.created_at))::float8,
       min(p.consistent_point)::text
  from pins p where p.source = %(source)s and exists (
       select from tables t where t.source = p.source and t.pin = p.pin and t.state = 'copying')
 group by 1
"""
# Before anything was cared for: since a table could have been, and the totals are kept.
_IDLE = """
select extract(epoch from clock_timestamp() - coalesce(
       (select ended_at from work_done
         where source = %(source)s and kind = 'maintenance' and outcome = 'done'),
       greatest(min(t.updated_at), (select min(applied_at) from schema_version
                                     where version >= 34))))::float8
  from tables t where t.source = %(source)s and t.state = any(%(settled)s)
having count(*) > 0
"""


@dataclass(frozen=True, slots=True)
class PinFigures:
    """The pins of a kind that tables are copied under; ``point``: the oldest one's LSN."""

    kind: str
    count: int
    oldest_seconds: float
    point: Lsn


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one moment. ``tables`` and ``paused`` go by name.

    ``maintenance_idle_seconds``: since care of any table was through; None without a table.
    """

    tables: Mapping[str, TableFacts]
    paused: frozenset[str]
    work: tuple[Work, ...]
    pins: tuple[PinFigures, ...]
    maintenance_idle_seconds: float | None
    groups: tuple[GroupStatus, ...] = ()


def look(store: LogStore) -> Figures:
    """Raises psycopg.Error."""
    which = {"source": store.source, "settled": [*SETTLED]}
    pins = store.connection.execute(_PINS, which).fetchall()
    idle = store.connection.execute(_IDLE, which).fetchone()
    return Figures(
        {row.name: row for row in table_rows(store)},
        frozenset(map(str, paused(store))),
        tuple(totals(store.connection, store.source)),
        tuple(PinFigures(kind, count, age, Lsn.parse(lsn)) for kind, count, age, lsn in pins),
        idle[0] if idle else None,
        groups(store),
    )
