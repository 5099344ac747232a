"""Polls: each notes where the source is and who is running, then reads what may be new.

The package argues why that finds every change. Who polls stages and registers the parts, with
:meth:`Poller.register` in the same transaction, and then calls :meth:`Poller.over`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

import psycopg
import pyarrow as pa
from psycopg import sql

from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import ReplicationLost, TableProblem
from cdc_assets.log.staged.watermarks import (
    ReadAt,
    Watermark,
    lower_watermarks,
    set_levels,
    set_watermarks,
    watermarks,
)
from cdc_assets.log.states import TableState
from cdc_assets.log.store import LogStore
from cdc_assets.log.table_row import TableRow
from cdc_assets.poller.bounds import WHOLE, Known, Running
from cdc_assets.poller.clock import Clock
from cdc_assets.poller.rows import Asked, Found, page
from cdc_assets.poller.shape import Shape, shapes
from cdc_assets.poller.source import Place, bound, place, rule, running, watermark
from cdc_assets.poller.troubles import LONG_SECONDS, Troubles, Unread
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.pgoutput import Relation
from cdc_assets.postgres.session.connect import Connection
from cdc_assets.postgres.session.waits import locked

logger = logging.getLogger(__name__)

# Bounds of tables without changes are persisted so often: who goes on later reads as much again.
_REMEMBER_SECONDS = 60.0
_QUERIED = (TableState.WAITING, TableState.COPYING, TableState.STREAMING)


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a table, to be staged in this order; several come of one table."""

    table: TableId
    relation: Relation
    rows: pa.Table


@dataclass(frozen=True, slots=True)
class _State:
    """What is known of a copy of a table. ``seen``: row versions that are staged.

    ``level``: the log has what of it was visible at that LSN.
    """

    epoch: int
    rule: str
    known: Known
    relation: Relation | None = None
    seen: AbstractSet[str] = frozenset()
    remembered_at: float = float("-inf")
    level: Lsn = Lsn.ZERO


@dataclass(frozen=True, slots=True)
class Hidden:
    """The watermarks from which on changes may be hidden, of all tables, or of ``clocks`` alone."""

    at: int
    clocks: bool


@dataclass(slots=True)
class Poll:
    """One poll, noted and not yet over.

    ``rows``: the tables that are polled, ``asked`` those that this poll reads. ``troubles``: why
    tables couldn't be read. ``problems``: tables that can't go on. ``is_cut``: some weren't asked.
    """

    at: Place
    running: Running
    rows: Mapping[TableId, TableRow]
    asked: Mapping[TableId, Asked]
    problems: Mapping[TableId, TableProblem]
    hidden: Hidden | None
    known: Troubles
    troubles: dict[TableId, str]
    is_cut: bool
    found: dict[TableId, Found] = field(default_factory=dict)

    def read(self, source: Connection) -> Generator[Part | None]:
        """The rows of all tables, one after the other; None where a page has ended.

        Only there may the session be used for something else.
        """
        for table, asked in self.asked.items():
            found, began = Found(), time.monotonic()
            try:
                while not found.is_over:
                    for rows in self._page(source, asked, found):
                        yield Part(table, asked.shape.relation, rows)
                    yield None
                self.found[table] = found
            except (psycopg.Error, Unread) as error:
                seconds = time.monotonic() - began
                self.troubles[table] = self.known.note(source, table, error, seconds)
                if seconds > LONG_SECONDS and table != [*self.asked][-1]:
                    self.is_cut = True
                    return

    def _page(self, source: Connection, asked: Asked, found: Found) -> Iterator[pa.Table]:
        # Has the lock, of whatever kind the relation is, and of what is below it; reads no row.
        lock = sql.SQL("select from {} t where false").format(asked.table.rows)
        # While its lock is held, the table is what the look at the catalog shows.
        with source.transaction():
            source.execute(lock)
            if not asked.shape.is_still(source):
                raise Unread("it is being altered")
            yield from page(source, asked, found)


@dataclass(frozen=True, slots=True)
class Ending:
    """What a poll leaves, once its rows are registered.

    ``level``: the log has what of all tables was visible at that LSN; ``levels``: of those that are
    ahead of it.
    """

    states: Mapping[TableId, _State]
    moved: Sequence[Watermark]
    hidden: Hidden | None
    read: ReadAt
    level: Lsn
    levels: Mapping[TableId, Lsn]


class Poller:
    """The polls of a source, one after the other; used by one thread."""

    def __init__(self, config: SourceConfig, store: LogStore) -> None:
        self._config = config
        self._store = store
        self._states = dict[TableId, _State]()
        self._read = ReadAt.last(store)
        self._clock = None if self._read is None else Clock(self._read.clock, None)
        self._troubles = Troubles()

    @property
    def again_at(self) -> float:
        """When the next table that couldn't be read is due (monotonic); infinity without any."""
        return self._troubles.again_at

    def note(self, source: Connection, *, whole: bool = True) -> Poll:
        """Begin a poll: note what it has to know before anything is read.

        Unless ``whole``, it is of those tables alone that couldn't be read, and are due again; else
        of all others.

        Raises ReplicationLost for a server that is behind what was read: it has rows of before.
        """
        at = place(source)
        if self._read is not None and at.lsn < self._read.lsn:
            raise ReplicationLost(
                f"the source is at {at.lsn}, and was read up to {self._read.lsn} before: it is a"
                " server that is behind that one, or was restored.",
                "It is read once it has caught up. If it never will: cdc-assets resync --all.",
            )
        rows = self._rows()
        hidden = self._heed(at, rows)
        self._troubles.keep(rows)
        troubles = dict(self._troubles.known if whole else self._troubles.resting)
        wanted = [t for t in rows if t not in troubles] if whole else self._troubles.due
        bounds = self._bounds(source, at, wanted, troubles)
        active = running(source, at)  # after the bounds, and before anything is read
        shaped = shapes(source, self._config, [rows[table] for table in bounds])
        return Poll(
            at,
            active,
            rows,
            {
                table: self._asked(table, shape, bounds[table], active, at)
                for table, shape in shaped.items()
                if isinstance(shape, Shape)
            },
            {t: shape for t, shape in shaped.items() if isinstance(shape, TableProblem)},
            hidden,
            self._troubles,
            troubles,
            any(table not in bounds and table not in troubles for table in wanted),
        )

    def ending(self, poll: Poll, read: Lsn) -> Ending:
        """What it leaves if it is over now; whatever it has read had committed below ``read``.

        Of a table without changes the bound is persisted from time to time.
        """
        now, states, moved = time.monotonic(), dict[TableId, _State](), list[Watermark]()
        for table, found in poll.found.items():
            before, asked = self._states[table], poll.asked[table]
            known = before.known.then(poll.running, asked.bound)
            at = before.remembered_at
            if found.rows or poll.hidden is not None or now - at > _REMEMBER_SECONDS:
                at = now
                moved.append(Watermark(table, before.epoch, before.rule, known.safe))
            states[table] = _State(
                before.epoch,
                before.rule,
                known,
                asked.shape.relation,
                found.seen,
                at,
                poll.at.lsn,
            )
        levels = {
            table: (states.get(table) or self._states[table]).level
            for table in poll.rows.keys() - poll.problems.keys()
        }
        level = min(levels.values(), default=poll.at.lsn)
        ahead = {table: levels[table] for table in states if levels[table] > level}
        return Ending(states, moved, poll.hidden, self._read_at(poll, read), level, ahead)

    def register(self, ending: Ending) -> None:
        """Persist it, in the transaction that registers the rows."""
        if ending.hidden is not None:  # of tables as well that weren't read, or are parked
            lower_watermarks(self._store, ending.hidden.at, "clock" if ending.hidden.clocks else "")
        if ending.moved:
            set_watermarks(self._store, ending.moved)
        if ending.levels:
            set_levels(self._store, ending.levels)
        ending.read.remember(self._store)

    def over(self, poll: Poll, ending: Ending) -> None:
        """It is registered, and counts from now on."""
        self._states |= ending.states
        self._troubles.over(ending.states)
        for table in poll.troubles.keys() & poll.asked.keys():  # some of its rows may be staged
            self._states[table] = replace(self._states[table], seen=frozenset())
        self._read = ending.read
        if poll.at.is_dated:
            self._clock = poll.at.clock

    def registered_some(self, ending: Ending) -> None:
        """Persist, in the caller's transaction, that some of its rows are registered already.

        But not its clock and timeline: what they may have hidden isn't read yet.
        """
        read, before = ending.read, self._read
        if before is not None:
            read = replace(read, clock=before.clock, timeline=before.timeline)
        read.remember(self._store)

    def _read_at(self, poll: Poll, read: Lsn) -> ReadAt:
        before = self._read
        lsn = read if before is None else max(read, before.lsn)
        clock = poll.at.clock.server if poll.at.is_dated or before is None else before.clock
        return ReadAt(lsn, clock, poll.at.timeline)

    # --- what a poll begins with ---

    def _rows(self) -> dict[TableId, TableRow]:
        """The tables that have a copy, or are being copied: what comes later is queried."""
        configured = {table.id for table in self._config.tables}
        marks = watermarks(self._store)
        found = dict[TableId, TableRow]()
        for row in self._store.tables(None, *_QUERIED):
            mark = marks.get(row.table)
            if row.table not in configured or row.snapshot_lsn is None or mark is None:
                continue
            if mark.epoch != row.epoch:
                continue  # its next copy isn't pinned yet
            found[row.table] = row
            wanted = rule(watermark(self._config.table(row.table)))
            state = self._states.get(row.table)
            if state is None or (state.epoch, state.rule) != (row.epoch, wanted):
                known = Known(mark.bound if mark.rule == wanted else WHOLE)
                self._states[row.table] = _State(row.epoch, wanted, known)
        return found

    def _heed(self, at: Place, rows: Mapping[TableId, TableRow]) -> Hidden | None:
        """Have read again what a clock that was set back, or a failover, may have hidden."""
        dated = self._clock if at.is_dated else None
        lowest = dated.lowest(at.clock) if dated is not None else None
        if self._read is not None and self._read.timeline != at.timeline:
            logger.warning("the source is on another timeline: each table is read whole")
            for table in rows:
                self._states[table] = replace(self._states[table], known=Known(), seen=frozenset())
            return Hidden(WHOLE, clocks=False)
        if lowest is not None:
            logger.warning("the source's clock was set back: what may be hidden is read again")
            for table in rows:
                if watermark(self._config.table(table)).order == "clock":
                    known = self._states[table].known.lowered(lowest)
                    self._states[table] = replace(self._states[table], known=known)
            return Hidden(lowest, clocks=True)
        return None

    def _bounds(
        self,
        source: Connection,
        at: Place,
        wanted: Sequence[TableId],
        troubles: dict[TableId, str],
    ) -> dict[TableId, int]:
        """Of those that aren't locked, up to a failure that took long: nobody waits for many."""
        bounds, busy = dict[TableId, int](), locked(source, wanted)
        for table in wanted:
            began = time.monotonic()
            try:
                if table in busy:
                    raise Unread(f"it is locked, or about to be: {busy[table]}")
                bounds[table] = bound(source, self._config.table(table), at)
            except (psycopg.Error, Unread) as error:
                seconds = time.monotonic() - began
                troubles[table] = self._troubles.note(source, table, error, seconds)
                if seconds > LONG_SECONDS:
                    break
        return bounds

    def _asked(self, table: TableId, shape: Shape, until: int, active: Running, at: Place) -> Asked:
        state = self._states[table]
        return Asked(
            self._config.table(table),
            shape,
            state.known.begin(active),
            until,
            state.seen if state.relation == shape.relation else frozenset(),
            at.clock.server,
            at.in_recovery,
        )
