"""The workers that merge, or read for another group, as the log knows them."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import datetime

from cdc_assets.log.session import STALE_SECONDS
from cdc_assets.log.store import LogStore
from cdc_assets.log.tables import GROUP
from cdc_assets.postgres.names import TableId

_WORKERS = """
select c.worker, c.process, c.tables, c.started_at, extract(epoch from clock_timestamp() - max(
         s.heartbeat_at))::float8,
       count(a.pid) > 0 and max(s.heartbeat_at)
         >= clock_timestamp() - make_interval(secs => %(stale)s),
       (select coalesce(jsonb_object_agg(k.table_name, k.epoch), '{}') from claims k
         where k.worker = c.worker and k.consumer_group = c.consumer_group
           and k.source = c.source)
  from consumer c
  left join sessions s on s.holder = c.worker
  left join pg_stat_activity a
    on a.pid = s.pid and coalesce(a.backend_start = s.backend_start, true)
 where c.consumer_group = %(group)s and c.source = %(source)s
 group by c.worker order by c.started_at, c.worker
"""


@dataclass(frozen=True, slots=True)
class KnownWorker:
    """A worker as the others see it; ``claims`` are its tables with their epochs."""

    worker: uuid.UUID
    process: str
    tables: frozenset[TableId]
    started_at: datetime
    heard_seconds_ago: float | None
    alive: bool
    claims: dict[TableId, int]


def workers(store: LogStore, group: str = GROUP) -> list[KnownWorker]:
    """Every worker of the source's group that hasn't left, the longest there first."""
    which = {"group": group, "source": store.source, "stale": STALE_SECONDS}
    rows = store.connection.execute(_WORKERS, which).fetchall()
    return [
        KnownWorker(
            worker,
            process,
            frozenset(TableId.parse(name) for name in tables),
            started,
            heard,
            alive,
            {TableId.parse(name): epoch for name, epoch in claims.items()},
        )
        for worker, process, tables, started, heard, alive, claims in rows
    ]
