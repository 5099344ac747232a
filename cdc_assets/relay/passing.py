"""One step of passing the first log on: one transaction, see the package."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, LiteralString

from cdc_assets.config.source import SourceConfig
from cdc_assets.log.asked.markers import take_markers
from cdc_assets.log.copies.chunks import restart_copy
from cdc_assets.log.locks import PINS_LOCK
from cdc_assets.log.states import LOGGED
from cdc_assets.log.store import LogStore
from cdc_assets.log.tables import GROUP
from cdc_assets.messages.texts import copy_anew
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.relay.beginning import begin_relay
from cdc_assets.relay.first import logged_copy, why_unlogged

logger = logging.getLogger(__name__)

# Of one table in a step, about: after an outage there may be millions.
MOST_ENTRIES = 1_000

# A marker that the second log doesn't have yet ends a flush.
_CUT = """
select f.lsn::text, f.commit_time, o.lsn::text, o.awaited::text,
       (select min(m.lsn) from markers m
         where m.source = f.source and m.lsn > o.lsn and m.lsn <= f.lsn)::text
  from flushed_lsn f left join flushed_lsn o on o.source = %(source)s where f.source = %(first)s
"""
# The copy of a table that the first source (a) logs now; see ``first.logged_copy``.
_LOGGED_COPY: LiteralString = """
case when a.oid <> 0 and a.state = any(%(logged)s) then a.epoch || ':' || a.snapshot_lsn end
"""
_DUE: LiteralString = f"""
with due as materialized (
    select g.table_name, s.next_offset
      from mat_cursor g
      join tables a on a.source = g.source and a.table_name = g.table_name
       and g.copy = {_LOGGED_COPY}
      join tables t on t.source = %(source)s and t.table_name = g.table_name
       and t.oid <> 0 and t.state = any(%(logged)s)
      join log_seq e on e.source = g.source and e.table_name = g.table_name
      join log_seq s on s.source = %(source)s and s.table_name = g.table_name
       and s.next_offset < e.next_offset
     where g.consumer_group = %(group)s and g.source = %(first)s)
"""
# Each table has at most so many entries below it.
_BOUND: LiteralString = f"""
{_DUE}
select min(i.flushable_lsn)::text
  from due d cross join lateral (
       select flushable_lsn from log_index i
        where i.source = %(first)s and i.table_name = d.table_name
          and i.start_offset >= d.next_offset
        order by start_offset offset %(most)s - 1 limit 1) i
"""
_PASS: LiteralString = f"""
{_DUE},
passed as (
    insert into log_index (source, table_name, start_offset, end_offset, path, row_count, byte_size,
                           flushable_lsn, commit_time, first_row, sha256)
    select %(source)s, i.*
      from due d cross join lateral (
           select table_name, start_offset, end_offset, path, row_count, byte_size, flushable_lsn,
                  commit_time, first_row, sha256
             from log_index i
            where i.source = %(first)s and i.table_name = d.table_name
              and i.start_offset >= d.next_offset and i.flushable_lsn <= %(cut)s::pg_lsn) i
    returning table_name, end_offset, row_count, byte_size),
ends as (
    update log_seq s set next_offset = p.last
      from (select table_name, max(end_offset) as last from passed group by table_name) p
     where s.source = %(source)s and s.table_name = p.table_name)
select count(*), sum(row_count)::bigint, sum(byte_size)::bigint from passed group by table_name
"""
# What the flusher has found out of columns that came later.
_COVERED = """
update tables t
   set mask_numbers = a.mask_numbers || t.mask_numbers, excluded_numbers = array(
       select distinct n from unnest(t.excluded_numbers || a.excluded_numbers) n order by n)
  from tables a
 where t.source = %(source)s and a.source = %(first)s and a.table_name = t.table_name
   and a.oid = t.oid and not (t.excluded_numbers @> a.excluded_numbers
                              and t.mask_numbers ?& array(select jsonb_object_keys(a.mask_numbers)))
"""
_ENDED: LiteralString = f"""
select t.table_name, t.snapshot_lsn is not null and g.table_name is null
  from tables t
  left join tables a on a.source = %(first)s and a.table_name = t.table_name
  left join mat_cursor g on g.consumer_group = %(group)s and g.source = %(first)s
                        and g.table_name = t.table_name
 where t.source = %(source)s and t.oid <> 0 and t.state = any(%(logged)s)
   and (t.snapshot_lsn is not null or t.followed)
   and (g.copy is null or g.copy is distinct from {_LOGGED_COPY})
"""
# What is parked, given up, or of a copy that is logged no more, holds nothing.
_RELEASE: LiteralString = f"""
delete from mat_cursor g
 where g.consumer_group = %(group)s and g.source = %(first)s and not exists (
       select from tables t
         join tables a on a.source = g.source and a.table_name = t.table_name
        where t.source = %(source)s and t.table_name = g.table_name and t.oid <> 0
          and t.state = any(%(logged)s) and g.copy = {_LOGGED_COPY})
"""
_FOLLOW = """
update mat_cursor g set "offset" = l."offset", updated_at = now()
  from mat_cursor l
  join tables t on t.source = l.source and t.table_name = l.table_name and t.state = 'streaming'
 where g.consumer_group = %(group)s and g.source = %(first)s
   and l.consumer_group = %(lake)s and l.source = %(source)s and l.table_name = g.table_name
   and l."offset" <> g."offset"
"""


@dataclass(frozen=True, slots=True)
class Passed:
    """What a step did. ``flushed``: where the second log is now; None: there is none yet.

    ``first``: where the first one was. ``awaited``: the LSN that somebody waits for here.
    """

    flushed: Lsn | None = None
    first: Lsn = Lsn.ZERO
    awaited: Lsn = Lsn.ZERO
    entries: int = 0
    rows: int = 0
    bytes: int = 0

    @property
    def is_level(self) -> bool:
        return self.flushed is None or self.flushed >= self.first


def pass_on(config: SourceConfig, store: LogStore, first: LogStore, *, most_marks: int) -> Passed:
    """Take one step; of a transaction's markers ``most_marks`` make marks.

    Raises ReplicationLost, and nothing was passed on, if the source was dropped meanwhile.
    """
    done = _step(config, store, first, most_marks)
    if done is not None:
        return done
    if store.try_lock(PINS_LOCK):  # who drops the source has it, and leaves no beginning behind
        try:
            begin_relay(config, store)
        finally:
            store.unlock(PINS_LOCK)
    return Passed(store.flushed_lsn())


def _step(config: SourceConfig, store: LogStore, first: LogStore, most_marks: int) -> Passed | None:
    """None if the log has no beginning, or lost it."""
    which = _which(config, store, first)
    with store.connection.transaction():
        row = store.connection.execute(_CUT, which).fetchone()
        known = store.flushed_lsn() if row is None else _lsn(row[2])
        flushed = Lsn.parse(row[0]) if row is not None else None
        if known is None or flushed is None or flushed < known:
            if known is not None:
                logger.warning("the log of %s has begun anew, and so does this one", first.source)
                store.begin_anew()
            return None
        assert row is not None
        marker = _lsn(row[4])
        bound = store.connection.execute(_BOUND, {**which, "most": MOST_ENTRIES}).fetchone()
        cut = min(marker or flushed, (_lsn(bound[0]) if bound else None) or flushed)
        done = store.connection.execute(_PASS, {**which, "cut": str(cut)}).fetchall()
        # Before tables are locked: who drops the source comes in this order, too.
        if done or cut > known:
            store.advance(cut, row[1] if cut == flushed else None)
        if done:
            store.connection.execute(_COVERED, which)
        _end_copies(config, store, first, which)
        if cut == marker:
            _take_markers(config, store, first, cut, most_marks)
        return Passed(
            max(cut, known),
            flushed,
            _lsn(row[3]) or Lsn.ZERO,
            *(sum(int(table[i]) for table in done) for i in range(3)),
        )


def let_go(config: SourceConfig, store: LogStore, first: LogStore) -> None:
    """Have the group hold in the first log what the second lake hasn't merged, and no more."""
    which = _which(config, store, first)
    with store.connection.transaction():
        store.connection.execute(_RELEASE, which)
        store.connection.execute(_FOLLOW, which)


def _lsn(text: str | None) -> Lsn | None:
    return None if text is None else Lsn.parse(text)


def _which(config: SourceConfig, store: LogStore, first: LogStore) -> dict[str, Any]:
    assert config.log is not None
    return {
        "source": store.source,
        "first": first.source,
        "group": config.log.group,
        "lake": GROUP,
        "logged": [*LOGGED],
    }


def _end_copies(
    config: SourceConfig, store: LogStore, first: LogStore, which: dict[str, Any]
) -> None:
    """Begin the copies anew whose log doesn't go on; park those that nothing was held for."""
    assert config.log is not None
    for name, unheld in store.connection.execute(_ENDED, which).fetchall():
        table = TableId.parse(name)
        row, theirs = store.table(table), first.table(table)
        assert row is not None  # it was just read
        if unheld:
            reason = (
                f"the consumer group {config.log.group} of source {first.source} holds nothing of"
                " its log, of which parts may be gone: it was dropped, or is new."
                f" {copy_anew(table)}"
            )
            logger.error("parked: %s: %s", table, reason)
            store.park(table, reason, row.epoch)
            continue
        logger.warning("%s: its log has ended at %s, and it is copied anew", table, first.source)
        restart_copy(store, row)
        if logged_copy(theirs) is None:
            store.note_waiting(table, why_unlogged(first.source, theirs))


def _take_markers(
    config: SourceConfig, store: LogStore, first: LogStore, at: Lsn, most: int
) -> None:
    markers: Sequence[tuple[str, str]] = store.connection.execute(
        "select marker, name from markers where source = %s and lsn = %s order by number",
        (first.source, str(at)),
    ).fetchall()
    take_markers(store, at, markers, [table.id for table in config.tables], most=most)
