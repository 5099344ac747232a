"""How a source's consumer groups stand: who reads, how far behind, and what waits for them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from psycopg.rows import class_row

from cdc_assets.log.groups.lakes import LOG_GROUP, LOG_OF
from cdc_assets.log.session import STALE_SECONDS
from cdc_assets.log.store import LogStore
from cdc_assets.log.tables import GROUP
from cdc_assets.messages.texts import counted


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """A group as of one look. ``tables`` have begun or are about to; ``processes`` are alive.

    ``pending_rows``: of the log that it hasn't committed. ``lag_seconds``: since the oldest of them
    was committed at the source, or the group claimed or began a table that it hasn't read the
    snapshot of; None if it has everything. ``held_bytes``: about so much is staged, and kept for
    this group alone: the lake has it. ``behind``: the table that waits longest.
    ``uncared_seconds``: of a second lake, since one of its tables streams, or the last care of any
    was through, what is later; what it has merged is kept until then. None if none streams.
    """

    name: str
    tables: int
    processes: list[str]
    pending_rows: int
    lag_seconds: float | None
    held_bytes: int
    behind: str | None
    uncared_seconds: float | None = None

    @property
    def sentence(self) -> str:
        who = ", ".join(self.processes) or "no process"
        said = f"{counted(self.tables, 'table')}, read by {who}"
        if self.lag_seconds is None:
            return f"{said}; it has everything"
        return (
            f"{said}; {self.pending_rows:,} changes wait, since {self.lag_seconds:,.0f} s;"
            f" {self.held_bytes / 1e6:,.1f} MB staged are kept for it alone"
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


# Tables that are given up hold nothing (maintenance.staged). A dead group's log has millions of
# entries: the first ones tell how old they are, and how large a change is.
_GROUPS = """
with member as (
    select consumer_group, table_name from mat_cursor where source = %(source)s
     union select consumer_group, table_name from claims where source = %(source)s),
at as (
    select g.consumer_group, g.table_name,
           coalesce(greatest(s.next_offset - greatest(m."offset", b.first), 0), 0) as rows,
           coalesce(greatest(l."offset" - greatest(m."offset", b.first), 0) * b.bytes, 0) as bytes,
           extract(epoch from clock_timestamp() - case when m."offset" is null then k.claimed_at
             when m.snapshot_id is not null then m.updated_at else b.oldest end)::float8 as lag
      from member g
      join tables t on t.source = %(source)s and t.table_name = g.table_name and t.oid <> 0
      left join mat_cursor m on m.consumer_group = g.consumer_group and m.source = %(source)s
                            and m.table_name = g.table_name
      left join claims k on k.consumer_group = g.consumer_group and k.source = %(source)s
                        and k.table_name = g.table_name
      left join mat_cursor l on l.consumer_group = %(lake)s and l.source = %(source)s
                            and l.table_name = g.table_name
      left join log_seq s on s.source = %(source)s and s.table_name = g.table_name
      cross join lateral (
           select min(i.start_offset) as first, min(i.commit_time) as oldest,
                  sum(i.byte_size) / sum(i.row_count) as bytes
             from (select start_offset, commit_time, byte_size, row_count from log_index
                    where source = %(source)s and table_name = g.table_name
                      and end_offset > coalesce(m."offset", 0)
                    order by end_offset limit 100) i) b
     where g.consumer_group <> %(lake)s),
cared as (
    select n.value as consumer_group, min(s.at) as at
      from pipeline_meta f
      join pipeline_meta n on n.source = f.source and n.key = %(log_group)s
     cross join lateral (
           select greatest(min(t.updated_at), (
                    select ended_at from work_done
                     where source = f.source and kind = 'maintenance' and outcome = 'done')) as at
             from tables t where t.source = f.source and t.state = 'streaming'
           having count(*) > 0) s
     where f.key = %(log_of)s and f.value = %(source)s group by 1)
select consumer_group as name, count(*) as tables, coalesce((
         select array_agg(distinct c.process order by c.process) from consumer c
           join sessions s on s.holder = c.worker
            and s.heartbeat_at >= clock_timestamp() - make_interval(secs => %(stale)s)
          where c.source = %(source)s and c.consumer_group = at.consumer_group), '{}') as processes,
       sum(rows)::bigint as pending_rows, max(lag) as lag_seconds,
       sum(bytes)::bigint as held_bytes,
       (array_agg(table_name order by lag desc, table_name) filter (where lag is not null))[1]
         as behind,
       (select extract(epoch from clock_timestamp() - c.at)::float8 from cared c
         where c.consumer_group = at.consumer_group) as uncared_seconds
  from at group by consumer_group order by consumer_group
"""


def groups(store: LogStore) -> tuple[GroupStatus, ...]:
    """The groups that have read anything or are about to, by name: one query."""
    which = {"source": store.source, "lake": GROUP, "stale": STALE_SECONDS}
    which |= {"log_of": LOG_OF, "log_group": LOG_GROUP}
    with store.connection.cursor(row_factory=class_row(GroupStatus)) as rows:
        return tuple(rows.execute(_GROUPS, which).fetchall())
