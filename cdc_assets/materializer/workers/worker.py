"""The workers that merge, and the tables that each has claimed.

A worker is one process, on any machine: a Dagster run, ``materialize``, ``materialize --follow``;
or one that reads for another consumer group (``consumers.stream``), which shares its tables alike.
It is alive by the heartbeats of ``log.sessions.heartbeat``, which ends the sessions, and with them
the locks, of a dead one; a dead worker's tables are free at once. ``shares`` makes shares fair.

Keeps invariant 9 with three fences against a worker that was taken for dead and comes back: its
session is gone, so it can't write to the coordination schema; its claim has another epoch; and a
commit that it began in the lake can't be published (``lake.publish``). So a table's log is applied
once, by any worker; the claim only assigns it to one.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection
from contextlib import suppress
from typing import Self

import psycopg

from cdc_assets.errors import Fenced
from cdc_assets.log.sessions.heartbeat import Heart
from cdc_assets.log.sessions.workers import workers
from cdc_assets.log.store import LogStore
from cdc_assets.log.tables import GROUP
from cdc_assets.materializer.workers.shares import Peer, moves
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.process.children import process_name
from cdc_assets.relay.first import refuse_other_log

# Between two reads of the others' shares: a cycle takes longer, waiting for one does not.
LOOK_SECONDS = 1.0
# Any worker may take a table that was free for this long: the worker due is held up by something.
STRAY_SECONDS = 10.0

_STRAY = """
select table_name from claims where consumer_group = %(group)s and source = %(source)s
   and worker is null and claimed_at < clock_timestamp() - make_interval(secs => %(stray)s)
"""
_TAKE = """
insert into claims as c (consumer_group, source, table_name, worker)
select %(group)s, %(source)s, name, %(worker)s from unnest(%(tables)s::text[]) as name
    on conflict (consumer_group, source, table_name) do update
   set worker = excluded.worker, epoch = c.epoch + 1, claimed_at = excluded.claimed_at
 where c.worker is null
returning table_name
"""
_GIVE = """
update claims set worker = null, claimed_at = clock_timestamp()
 where consumer_group = %(group)s and source = %(source)s and worker = %(worker)s
   and table_name = any(%(tables)s)
"""

_PROBLEM = """
update claims set problem = %(problem)s,
       problem_since = coalesce(problem_since, clock_timestamp())
 where consumer_group = %(group)s and source = %(source)s and worker = %(worker)s
   and table_name = %(table)s
"""


class Worker:
    """This process among the workers; a context manager, for the thread that uses the pipeline.

    Raises SourceMismatch if the log was begun with another ``log`` than the configuration has.
    """

    def __init__(self, pipeline: Pipeline, tables: Collection[TableId], group: str = GROUP) -> None:
        refuse_other_log(pipeline.config, pipeline.store)
        self._store, self._group = pipeline.store, group
        self._wants = frozenset(tables)
        self._heart = Heart(pipeline.config)
        self._heart.adopt(self._store)
        self._heart.start()
        self._has = frozenset[TableId]()
        self.relieved = False
        """As of the last :meth:`share`: a later worker wants all of this one's tables."""
        self._looked_at = 0.0
        self._store.connection.execute(
            "insert into consumer (worker, consumer_group, source, process, tables)"
            " values (%s, %s, %s, %s, %s)",
            (self.id, group, self._store.source, process_name(), self._names(self._wants)),
        )

    @property
    def id(self) -> uuid.UUID:
        return self._heart.holder

    def share(
        self,
        wants: Collection[TableId],
        heavy: Collection[TableId] = (),
        keep: Collection[TableId] = (),
    ) -> frozenset[TableId]:
        """The tables of ``wants`` that this worker has now.

        ``heavy``: those with a long backlog. ``keep``: those at work, which it can't give away.
        Raises Fenced if this worker was taken for dead.
        """
        if time.monotonic() - self._looked_at < LOOK_SECONDS and self._wants == frozenset(wants):
            return self._has
        found = {known.worker: known for known in workers(self._store, self._group)}
        if self.id not in found:
            raise Fenced("this worker wasn't heard of for too long: its tables went to others.")
        if dead := [known.worker for known in found.values() if not known.alive]:
            self._store.connection.execute("delete from consumer where worker = any(%s)", (dead,))
        if self._wants != frozenset(wants):
            self._wants = frozenset(wants)
            self._store.connection.execute(
                "update consumer set tables = %s where worker = %s",
                (self._names(self._wants), self.id),
            )
        which = {"group": self._group, "source": self._store.source, "worker": self.id}
        rows = self._store.connection.execute(_STRAY, {**which, "stray": STRAY_SECONDS}).fetchall()
        others = [
            Peer(known.tables, frozenset(known.claims))
            for known in found.values()
            if known.alive and known.worker != self.id
        ]
        me = found[self.id]
        self.relieved = any(
            known.alive and known.started_at > me.started_at and known.tables >= me.tables
            for known in found.values()
        )
        mine = frozenset(me.claims)
        due = moves(
            Peer(self._wants, mine), others, heavy, {TableId.parse(name) for (name,) in rows}
        )
        give = set(due.give) - set(keep)
        if give:
            self._store.connection.execute(_GIVE, {**which, "tables": self._names(give)})
        taken = set[TableId]()
        if due.take:
            rows = self._store.connection.execute(
                _TAKE, {**which, "tables": self._names(due.take)}
            ).fetchall()
            taken = {TableId.parse(name) for (name,) in rows}
        self._has = (mine - give) | taken
        self._looked_at = time.monotonic()
        return self._has

    def tell(self, table: TableId, problem: str) -> None:
        """Say why the table's log can't be applied, until its cursor is recorded again."""
        which = {"group": self._group, "source": self._store.source, "worker": self.id}
        self._store.connection.execute(_PROBLEM, {**which, "table": str(table), "problem": problem})

    def adopt(self, store: LogStore) -> None:
        """Send heartbeats for another session that holds locks for this worker."""
        self._heart.adopt(store)

    def leave(self) -> None:
        """Give everything away, and be no worker any more."""
        self._heart.close()
        with suppress(psycopg.Error):  # the end of the session has the same effect
            for statement in (
                "delete from consumer where worker = %s",
                "delete from sessions where holder = %s",
            ):
                self._store.connection.execute(statement.encode(), (self.id,))

    @staticmethod
    def _names(tables: Collection[TableId]) -> list[str]:
        return sorted(str(table) for table in tables)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()
