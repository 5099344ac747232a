"""How far queries have found what is staged, in query mode: a bound for each copy of a table.

Moved in the transaction that registers what was found (``poller``). The unit of a bound, and what
it counts from, is the watermark's: ``rule`` names that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from cdc_assets.log.session import LogSession
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId

# In pipeline_meta: where the source was when it was last read.
READ = "query_read"


@dataclass(frozen=True, slots=True)
class Watermark:
    """Of the copy with this epoch: whatever has a watermark below ``bound`` is registered."""

    table: TableId
    epoch: int
    rule: str
    bound: int


@dataclass(frozen=True, slots=True)
class ReadAt:
    """What was read had committed below ``lsn``, on ``timeline``; ``clock``: its time then."""

    lsn: Lsn
    clock: int
    timeline: int

    @classmethod
    def last(cls, store: LogSession) -> Self | None:
        found = store.meta(READ)
        if found is None:
            return None
        said = json.loads(found)
        return cls(Lsn.parse(said["lsn"]), int(said["clock"]), int(said["timeline"]))

    def remember(self, store: LogSession) -> None:
        said = {"lsn": str(self.lsn), "clock": self.clock, "timeline": self.timeline}
        store.set_meta(READ, json.dumps(said))


def watermarks(store: LogSession) -> Mapping[TableId, Watermark]:
    """Those of all tables that were ever pinned in query mode."""
    rows = store.connection.execute(
        "select table_name, epoch, rule, bound from query_watermarks where source = %s",
        (store.source,),
    )
    found = [Watermark(TableId.parse(name), *rest) for name, *rest in rows]
    return {one.table: one for one in found}


def lower_watermarks(store: LogSession, bound: int, order: str) -> None:
    """Have those be read from ``bound`` on that began above it; of one order, or all ("")."""
    store.connection.execute(
        "update query_watermarks set bound = least(bound, %s)"
        " where source = %s and pg_catalog.starts_with(rule, %s)",
        (bound, store.source, order),
    )


def set_levels(store: LogSession, levels: Mapping[TableId, Lsn]) -> None:
    """Record that the log of some tables is level beyond ``flushed_lsn``, which others hold up."""
    store.connection.execute(
        "update query_watermarks w set level = l.lsn, level_at = now()"
        " from unnest(%s::text[], %s::pg_lsn[]) l (table_name, lsn)"
        " where w.source = %s and w.table_name = l.table_name",
        ([*map(str, levels)], [*map(str, levels.values())], store.source),
    )


def set_watermarks(store: LogSession, some: Sequence[Watermark]) -> None:
    """Record bounds; one of an earlier epoch replaces none of a later one."""
    store.connection.execute(
        "insert into query_watermarks as w (source, table_name, epoch, rule, bound)"
        " select %s, * from unnest(%s::text[], %s::int[], %s::text[], %s::bigint[])"
        " on conflict (source, table_name) do update set epoch = excluded.epoch,"
        " rule = excluded.rule, bound = excluded.bound, updated_at = now(),"
        " level = case when w.epoch = excluded.epoch then w.level end"
        " where w.epoch <= excluded.epoch",
        (
            store.source,
            [str(one.table) for one in some],
            [one.epoch for one in some],
            [one.rule for one in some],
            [one.bound for one in some],
        ),
    )
