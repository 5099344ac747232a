"""Claiming chunks: how workers share the reading, without a coordinator.

Workers, of any number of processes and machines, take the next free chunks with ``for update skip
locked``. A claim lives by its heartbeat and by its session: its chunks are free again when the
session has ended, or was silent for STALE_SECONDS by the coordination server's clock. Every claim
has an id of its own, the fence: written chunks count only if they still carry that id, so a worker
that comes back late, or whose table was pinned anew, can't add anything.

Used by the tasks of a copy, each with a connection of its own.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import psycopg

from cdc_assets.log.session import HEARTBEAT_SECONDS, STALE_SECONDS, enter
from cdc_assets.postgres.session.connect import NO_NEW_TIMEOUTS
from cdc_assets.process.helper_thread import HelperThread

# Claimable chunks: never claimed, or claimed by a session that ended or fell silent.
FREE = """
c.source = %(source)s and c.table_name = %(table)s and c.epoch = %(epoch)s
and (c.state = 'planned' or (c.state = 'claimed' and (
     c.heartbeat_at < clock_timestamp() - make_interval(secs => %(stale)s)
     or not exists (select from pg_stat_activity a where a.pid = c.claim_pid))))
and (%(only)s::text[] is null or c.chunk = any(%(only)s))
and exists (select from tables t where t.source = c.source and t.table_name = c.table_name
               and t.epoch = c.epoch and t.pin = %(pin)s::uuid and t.state = 'copying')
"""
_CLAIM = f"""
with free as (
    select c.chunk from snapshot_progress c where {FREE}
     order by c.chunk limit (
            select least(%(most)s, greatest(1, count(*) / (2 * %(workers)s)))
              from snapshot_progress c where {FREE})
       for update of c skip locked)
update snapshot_progress c
   set state = 'claimed', claim = %(claim)s, claim_pid = pg_backend_pid(),
       claimed_by = %(worker)s, heartbeat_at = clock_timestamp(), file = null
  from free where c.source = %(source)s and c.table_name = %(table)s and c.epoch = %(epoch)s
   and c.chunk = free.chunk
returning c.chunk, c.relation_oid, c.filenode, c.first_block, c.end_block
"""


@dataclass(frozen=True, slots=True)
class Claimed:
    """A chunk that is ours to read: pages of the heap that had this oid and file."""

    key: str
    oid: int
    filenode: int
    first_block: int
    end_block: int | None


@dataclass(frozen=True, slots=True)
class Written:
    """A written chunk, and its cost: rows, bytes (of Arrow data), seconds.

    ``read_lsn``: what was seen of it had committed below, if it wasn't read under the pin.
    """

    key: str
    rows: int
    bytes: int
    seconds: float
    read_lsn: str | None = None


@dataclass(frozen=True, slots=True)
class ClaimScope:
    """The chunks that a worker may claim: of one epoch of one table, under one pin."""

    dsn: str
    schema: str
    source: str
    table: str
    epoch: int
    pin: str
    only: tuple[str, ...] | None = None
    most: int = 8
    """Chunks of a claim at most; towards the end a worker takes half its share of those left."""
    workers: int = 1


class Claims:
    """One worker's claims; keeps them alive from a thread until they are written or released."""

    def __init__(self, scope: ClaimScope, worker: str) -> None:
        self._scope = scope
        self._worker = worker
        self._claim: str | None = None
        self._connection = psycopg.connect(scope.dsn, autocommit=True)
        self._connection.execute(NO_NEW_TIMEOUTS)  # it is idle while a chunk is read
        enter(self._connection, scope.schema, scope.source)
        self._heart = HelperThread(
            "claims", self._beat, HEARTBEAT_SECONDS, at_end=self._connection.close
        )
        self._heart.start()

    def serve(self, scope: ClaimScope) -> None:
        """Go on to another table of the same coordination database."""
        self._scope = scope

    def take(self) -> list[Claimed]:
        """Claim some free chunks, in order; none when nothing is free."""
        self._claim = claim = str(uuid.uuid4())
        rows = self._connection.execute(
            _CLAIM,
            {
                **self._which(),
                "only": list(self._scope.only) if self._scope.only is not None else None,
                "pin": self._scope.pin,
                "stale": STALE_SECONDS,
                "most": self._scope.most,
                "workers": self._scope.workers,
                "claim": claim,
                "worker": self._worker,
            },
        ).fetchall()
        # These values become SQL at the source: nothing but integers may be in them.
        found = [
            Claimed(key, int(oid), int(node), int(first), None if end is None else int(end))
            for key, oid, node, first, end in rows
        ]
        return sorted(found, key=lambda chunk: chunk.key)

    def wrote(self, chunks: Sequence[Written], file: str | None) -> bool:
        """Record the claimed chunks as written to ``file``; False, having done nothing, if fenced.

        All of them or none: one file holds their rows.
        """
        try:
            with self._connection.transaction():
                for chunk in chunks:
                    done = self._connection.execute(
                        "update snapshot_progress set state = 'written', file = %s, rows = %s,"
                        " bytes = %s, seconds = %s, read_lsn = %s,"
                        " heartbeat_at = clock_timestamp()"
                        " where source = %s and table_name = %s and epoch = %s and chunk = %s"
                        " and state = 'claimed' and claim = %s",
                        (
                            file,
                            chunk.rows,
                            chunk.bytes,
                            chunk.seconds,
                            chunk.read_lsn,
                            self._scope.source,
                            self._scope.table,
                            self._scope.epoch,
                            chunk.key,
                            self._claim,
                        ),
                    )
                    if done.rowcount != 1:
                        raise _FencedOff
        except _FencedOff:
            return False
        finally:
            self.release()
        return True

    def release(self) -> None:
        """Release the claimed chunks that aren't written."""
        claim, self._claim = self._claim, None
        if claim is not None:
            self._connection.execute(
                "update snapshot_progress set state = 'planned', claim = null, claimed_by = null"
                " where source = %(source)s and table_name = %(table)s and epoch = %(epoch)s"
                " and state = 'claimed' and claim = %(claim)s",
                {**self._which(), "claim": claim},
            )

    def close(self) -> None:
        """Stop the heart; claimed chunks are free at once, because the session ends."""
        self._heart.close()

    def _which(self) -> dict[str, object]:
        scope = self._scope
        return {"source": scope.source, "table": scope.table, "epoch": scope.epoch}

    def _beat(self) -> None:
        if (claim := self._claim) is not None:
            self._connection.execute(
                "update snapshot_progress set heartbeat_at = clock_timestamp()"
                " where source = %(source)s and table_name = %(table)s"
                " and epoch = %(epoch)s and claim = %(claim)s and state = 'claimed'",
                {**self._which(), "claim": claim},
            )


class _FencedOff(Exception):
    """Rolls the transaction back."""
