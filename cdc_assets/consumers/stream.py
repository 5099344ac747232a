"""Following a consumer group: the tables' snapshots, and their changes from there on.

A process takes its share of the group's tables, as the workers of the lake do
(``materializer.workers``), with the same heartbeats: the tables of one that is dead, or paused for
as long, go to others, and what it does then is refused (``log.groups.cursors``).

A table begins with a claim, which holds its log; then a snapshot is chosen, and only then there is
a cursor, at the snapshot's offset. A process that dies at any step leaves a claim or
a cursor that holds too much, never too little. The snapshot counts once its end is committed;
before that it is read anew, from a new snapshot.

Quiet tables cost a query a look, however many they are.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import psycopg

from cdc_assets.config.groups.consumers import ConsumerConfig
from cdc_assets.config.source import SourceConfig, load_config
from cdc_assets.consumers.beginning import NOWHERE, Beginning
from cdc_assets.consumers.changes import changes
from cdc_assets.consumers.events import Event
from cdc_assets.consumers.place import Place
from cdc_assets.consumers.tables import following, group_of, newcomers, wanted
from cdc_assets.errors import ConfigurationError, Fenced, first_line
from cdc_assets.log.groups.cursors import GroupCursor, copy_name, held, move
from cdc_assets.log.groups.lakes import lake_of_group
from cdc_assets.log.states import TableState
from cdc_assets.materializer.workers.worker import Worker
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId

# A flusher registers once a second; and others' claims change when processes come and go.
LOOK_SECONDS = 1.0
SHARE_SECONDS = 3.0


def follow(
    config: SourceConfig | str | os.PathLike[str],
    group: str,
    *,
    token: Callable[[str], str | None] | None = None,
    until: Lsn | str | None = None,
    wait: bool = True,
) -> Stream:
    """Follow a source as one process of a consumer group of its YAML: a context manager.

    ``token``: gives what the program has kept of ``Event.token`` with its data, by table, or None;
    it is called when this process takes a table, and the table goes on exactly there. Without it
    the table goes on where the group has committed, so that the last events may come once more.
    ``wait=False`` ends once everything that was staged at the beginning was given. ``until``: an
    LSN; ends once everything that committed below it was given. Raises ConfigurationError.
    """
    loaded = config if isinstance(config, SourceConfig) else load_config(config)
    end = Lsn.parse(until) if isinstance(until, str) else until
    return Stream(loaded, group_of(loaded, group), token=token, until=end, wait=wait)


class Stream:
    """The events of the tables that this process has: iterate over it, in one thread."""

    def __init__(
        self,
        config: SourceConfig,
        group: ConsumerConfig,
        *,
        token: Callable[[str], str | None] | None = None,
        until: Lsn | None = None,
        wait: bool = True,
    ) -> None:
        self._written, self._group, self._token = config, group, token
        self._until, self._wait = until, wait
        self._places = dict[TableId, Place]()
        self._asked = frozenset[TableId]()
        self._targets: dict[str, int] | None = None
        self._stopped = threading.Event()
        self._looked_at = self._shared_at = float("-inf")

    def __enter__(self) -> Self:
        self._pipeline = Pipeline.open(following(self._written, self._group))
        self._store = self._pipeline.store
        if (lake := lake_of_group(self._store, self._group.name)) is not None:
            self._pipeline.close()
            raise ConfigurationError(
                f"the consumer group {self._group.name} is the lake of source {lake}.",
                "Follow a group of the program's own.",
            )
        self._beginning = Beginning(self._pipeline, self._group, self._token, self._move, self._act)
        try:
            self._worker = Worker(self._pipeline, self._wants(), self._group.name)
        except BaseException:
            self._pipeline.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.leave()
        self._pipeline.close()

    def stop(self) -> None:
        """End the iteration, from another thread or a signal's handler, before the next event."""
        self._stopped.set()

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables that this process has now."""
        return tuple(sorted(map(str, self._places)))

    @property
    def waits(self) -> dict[str, str]:
        """Tables of this process that nothing is given of for now, and why."""
        return {str(p.table): p.waits for p in self._places.values() if p.waits is not None}

    def commit(self) -> None:
        """Commit everything that was given, of all tables. Raises Fenced."""
        for place in list(self._places.values()):
            if place.dirty and not place.reading and place.copy is not None:
                self._commit(place, place.copy, place.offset)

    def begin_again(self, table: str) -> None:
        """Have the table begin anew: with ``Begin``, and a snapshot of now.

        Raises ConfigurationError if it isn't one of :attr:`tables`.
        """
        place = self._places.get(TableId.parse(table))
        if place is None:
            raise ConfigurationError(
                f"{table} isn't one of the tables that this process reads.",
                f"It reads: {', '.join(self.tables) or 'none yet'}.",
            )
        # The snapshot has to have the columns that the program knows of.
        self._move(place, GroupCursor(max(place.offset, place.least), None))
        place.forget()
        place.events = place.waits = None

    def __iter__(self) -> Iterator[Event]:
        with _in_session("what it follows isn't known any more"):
            yield from self._given()

    def _given(self) -> Iterator[Event]:
        self._targets, self._looked_at = None, float("-inf")
        while not self._stopped.is_set():
            self._look()
            given = False
            for place in list(self._places.values()):
                if self._stopped.is_set():
                    return
                if place.events is None or self._places.get(place.table) is not place:
                    continue
                if (event := next(place.events, None)) is None:
                    place.events = None
                    continue
                given = place.dirty = True
                yield event
                self._look()
            if given or any(place.events for place in self._places.values()):
                continue
            if self._is_over():
                return
            self._stopped.wait(LOOK_SECONDS)

    # --- what is to be done ---

    def _wants(self) -> list[TableId]:
        return wanted(self._pipeline.config, self._group)

    def _look(self) -> None:
        """See what this process has, and what there is of it; at most once in LOOK_SECONDS."""
        now = time.monotonic()
        if now - self._looked_at < LOOK_SECONDS:
            return
        if now - self._shared_at >= SHARE_SECONDS:
            new = newcomers(self._pipeline.config, self._group, self._store)
            if not new <= self._asked:
                self._asked = new
                self._pipeline.config = following(self._written, self._group)
            keep = [p.table for p in self._places.values() if p.dirty or p.reading]
            self._worker.share(self._wants(), keep=keep)
            self._shared_at = now
        self._looked_at = now
        self._aim()
        found = held(self._store, self._group.name, self._worker.id)
        for table in self._places.keys() - found.keys():
            del self._places[table]
        for table, seen in found.items():
            place = self._places.get(table)
            if place is None or place.held.epoch != seen.epoch:
                place = self._places[table] = Place(table, seen, seen.cursor)
            place.held = seen
            if seen.copy is None or (place.copy is not None and place.copy != seen.copy):
                place.forget()
                place.events = None
            if seen.copy is None:
                said = seen.state if seen.state is not None else "not registered yet"
                place.waits = f"it is {said}"
            elif place.events is None and now >= place.not_before and self._has_more(place):
                place.events = self._events(place)

    def _has_more(self, place: Place) -> bool:
        if place.copy is None:
            return True
        return place.offset < min(place.held.end, self._target(place))

    def _target(self, place: Place) -> float:
        if self._targets is None:
            return float("inf")
        return self._targets.get(str(place.table), 0)

    def _aim(self) -> None:
        """Find where it ends, if it does."""
        if self._targets is None and (
            not self._wait if self._until is None else self._store.is_flushed(self._until)
        ):
            self._targets = self._store.log_ends()

    def _is_over(self) -> bool:
        if self._targets is None:
            return False
        late = [place for place in self._places.values() if self._has_more(place)]
        if self._until is None:
            return all(place.waits is not None for place in late)
        return all(place.held.state == TableState.PARKED for place in late)

    # --- a table ---

    def _events(self, place: Place) -> Iterator[Event]:
        row = self._store.table(place.table)
        if row is None or row.state != TableState.STREAMING or row.snapshot_lsn is None:
            return
        copy = copy_name(row.epoch, row.snapshot_lsn)
        if place.copy is None:
            yield from self._beginning.events(place, row, copy)
        if place.copy == copy:
            yield from changes(
                self._pipeline, place, partial(self._act, place), lambda: self._target(place)
            )
            if place.copy is None:  # the log has a gap: nothing before a new beginning counts
                self._move(place, NOWHERE)
            elif not place.dirty and place.cursor and place.offset > place.cursor.offset:
                self._move(place, GroupCursor(place.offset, copy))

    def _act(self, place: Place, kind: Callable[..., Event], **more: Any) -> Event:
        """An event at the place's offset, that commits it."""
        commit = partial(self._commit, place, place.copy, place.offset)
        return kind(table=str(place.table), token=place.token, _commit=commit, **more)

    # --- the group's cursor ---

    def _commit(self, place: Place, copy: str | None, offset: int) -> None:
        if self._places.get(place.table) is not place:
            raise Fenced(f"{place.table}: another process of the group reads it by now.")
        cursor = place.cursor
        if cursor is None or copy != place.copy or cursor.copy != copy or place.reading:
            return  # it begins anew
        if offset < cursor.offset:
            return
        self._move(place, GroupCursor(offset, copy))
        if offset == place.offset:
            place.dirty = False

    def _move(self, place: Place, cursor: GroupCursor) -> None:
        with _in_session(str(place.table)):
            move(
                self._store,
                self._group.name,
                place.table,
                cursor,
                self._worker.id,
                place.held.epoch,
            )
        place.cursor = cursor


@contextmanager
def _in_session(what: str) -> Iterator[None]:
    """Raise Fenced where the session with the log has ended: others may have the tables by now."""
    try:
        yield
    except psycopg.OperationalError as error:
        raise Fenced(
            f"{what}: this process's session is over ({first_line(error)}): it wasn't"
            " heard of for too long, or the server is away. Begin again."
        ) from error
