"""Every registered table of a source, with its backlog and the progress of its copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from psycopg.rows import class_row

from cdc_assets.log.asked.adoptions import Adopted
from cdc_assets.log.states import TableState
from cdc_assets.log.store import LogStore
from cdc_assets.log.tables import GROUP
from cdc_assets.messages.texts import command
from cdc_assets.postgres.lsn import Lsn


@dataclass(frozen=True, slots=True)
class TableFacts:
    """A registered table with its backlog and the progress of its copy; seconds are ages."""

    name: str
    state: str
    reason: str | None
    epoch: int
    snapshot_lsn: str | None
    complete_lsn: str | None
    inserts_only: bool
    left_out: Sequence[str]
    applied_lsn: str | None
    applied_offset: int
    pending_rows: int
    pending_entries: int
    pending_bytes: int
    waiting_seconds: float | None
    chunks_done: int
    chunks_total: int
    rows_copied: int
    copy_rows_per_second: float | None
    copy_seconds_left: float | None
    copy_idle_seconds: float | None
    problem: str | None
    problem_seconds: float | None
    adopted: str | None
    level_lsn: str | None = None
    """In query mode: the log has the table up to there, though another may hold the log up."""
    level_seconds: float | None = None

    def present_problem(self, *, altered: bool) -> str | None:
        """What was told of the table, while there is something that can't be applied."""
        if self.state != TableState.STREAMING:
            return None
        return self.reason or (self.problem if self.pending_rows or altered else None)

    def position(self, flushed: Lsn | None) -> Lsn | None:
        """The LSN up to which the lake table shows the source; None before its copy is complete."""
        if self.state != TableState.STREAMING or self.snapshot_lsn is None:
            return None
        reached = Lsn.parse(self.snapshot_lsn)
        if self.applied_lsn is not None:
            reached = max(reached, Lsn.parse(self.applied_lsn))
        if flushed is not None and not self.pending_rows:
            reached = max(reached, flushed, self._level or flushed)
        # Resumed under a second snapshot, it isn't whole before complete_lsn.
        is_whole = self.complete_lsn is None or reached >= Lsn.parse(self.complete_lsn)
        return reached if is_whole else None

    def lag_seconds(
        self, position: Lsn | None, current: Lsn, behind_seconds: float | None
    ) -> float | None:
        """How long ago the lake table, which shows the source up to ``position``, equalled it.

        ``behind_seconds``: the same of the log.
        """
        if position is None:
            return None
        if self.pending_rows and self.waiting_seconds is not None:
            return max(0.0, self.waiting_seconds)
        if position >= current:
            return 0.0
        ages = [behind_seconds]
        if self._level is not None and self._level >= position:
            ages.append(self.level_seconds)
        return min((age for age in ages if age is not None), default=None)

    @property
    def _level(self) -> Lsn | None:
        return Lsn.parse(self.level_lsn) if self.level_lsn is not None else None

    @property
    def info(self) -> tuple[str, ...]:
        said = []
        if self.inserts_only:
            said.append("Postgres can't identify changed rows: inserts and truncates alone")
        if self.left_out:
            said.append(f"Postgres doesn't send its generated columns: {', '.join(self.left_out)}")
        if self.adopted is not None:
            verify = command("verify", "--table", self.name)
            what = f"its rows were never compared with the source's ({verify})"
            awaited = "it waits to be adopted, and nothing of it is touched"
            said.append(
                awaited if self.adopted == Adopted.AWAITED else f"it was adopted, and {what}"
            )
        return tuple(said)


# A copy is idle since its last chunk was written; before its first one since any table's last chunk
# was, or since its pin was made, whichever is later. Chunks of a complete copy, which may be many
# thousands, aren't read: the table has their sums.
_TABLES = """
select t.table_name as name, t.state, t.reason, t.epoch, t.snapshot_lsn::text, t.complete_lsn::text,
       t.inserts_only, t.left_out, m.applied_lsn::text, coalesce(m."offset", 0) as applied_offset,
       coalesce(b.rows, 0) as pending_rows, b.entries as pending_entries,
       coalesce(b.bytes, 0) as pending_bytes,
       extract(epoch from clock_timestamp() - b.oldest)::float8 as waiting_seconds,
       case when s.known then t.copied_chunks else p.done end as chunks_done,
       case when s.known then t.copied_chunks else p.total end as chunks_total,
       case when s.known then t.copied_rows else coalesce(p.rows, 0) end as rows_copied,
       (case when t.state = 'copying' then p.rows_a_second end)::float8 as copy_rows_per_second,
       (case when t.state = 'copying' then (p.total - p.done) / nullif(p.chunks_a_second, 0) end
       )::float8 as copy_seconds_left,
       case when t.state = 'copying' then extract(epoch from clock_timestamp() - greatest(
            coalesce(p.written_at, max(coalesce(p.written_at, t.copied_at)) over ()),
            i.created_at))::float8
       end as copy_idle_seconds,
       case when (a.value::jsonb ->> 'epoch')::int = t.epoch
            then nullif(a.value::jsonb ->> 'state', 'verified') end as adopted,
       k.problem, extract(epoch from clock_timestamp() - k.problem_since)::float8
         as problem_seconds,
       q.level::text as level_lsn,
       extract(epoch from clock_timestamp() - q.level_at)::float8 as level_seconds
  from tables t
 cross join lateral (
       select t.state in ('streaming', 'copied') and t.copied_chunks is not null as known) s
  left join claims k on k.consumer_group = %(group)s and k.source = t.source
                    and k.table_name = t.table_name and t.state = 'streaming'
  left join pins i on i.pin = t.pin
  left join query_watermarks q on q.source = t.source and q.table_name = t.table_name
                              and q.epoch = t.epoch
  left join pipeline_meta a on a.source = t.source and a.key = 'adopted:' || t.table_name
  left join mat_cursor m on m.consumer_group = %(group)s and m.source = t.source
                        and m.table_name = t.table_name
  left join lateral (
       select sum(l.row_count)::bigint as rows, min(l.commit_time) as oldest,
              count(*) as entries, sum(l.byte_size)::bigint as bytes from log_index l
        where l.source = t.source and l.table_name = t.table_name
          and l.end_offset > coalesce(m."offset", 0)
          and (t.snapshot_lsn is null or l.flushable_lsn > t.snapshot_lsn)) b on true
  left join lateral (
       select count(*) filter (where c.state = 'landed') as done, count(*) as total,
              sum(c.rows) filter (where c.state = 'landed')::bigint as rows,
              max(c.heartbeat_at) filter (where c.state in ('written', 'landed')) as written_at,
              sum(c.rows) filter (where w.recent) / greatest(1, extract(epoch from
                clock_timestamp() - min(c.heartbeat_at
                  - make_interval(secs => c.seconds)) filter (where w.recent))) as rows_a_second,
              count(*) filter (where w.recent) / greatest(1, extract(epoch from
                clock_timestamp() - min(c.heartbeat_at
                  - make_interval(secs => c.seconds)) filter (where w.recent))) as chunks_a_second
         from snapshot_progress c, lateral (
              select c.state in ('written', 'landed') and c.rows is not null
                     and c.heartbeat_at > clock_timestamp() - interval '1 minute' as recent) w
        where not s.known
          and c.source = t.source and c.table_name = t.table_name and c.epoch = t.epoch) p on true
 where t.source = %(source)s
"""


def table_rows(store: LogStore) -> list[TableFacts]:
    rows = store.connection.cursor(row_factory=class_row(TableFacts))
    return rows.execute(_TABLES, {"group": GROUP, "source": store.source}).fetchall()
