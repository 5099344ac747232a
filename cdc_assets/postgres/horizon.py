"""An LSN such that whatever committed below it is visible to every snapshot from now on.

A commit record is in the WAL before its transaction is visible: after its flush it waits for
synchronous standbys, as long as they take. So a snapshot may lack what committed below the LSN that
is current then. But each transaction that writes holds a lock on its own id from its first write
until it is visible: once all that held one when the LSN was current have ended, nothing is missing.

Source: PostgreSQL, src/backend/access/transam/xact.c, CommitTransaction: the record is flushed and
replicated (RecordTransactionCommit) before ProcArrayEndTransaction makes it visible, and locks are
released after that.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import Event, Timer
from typing import LiteralString, Self

from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.session.connect import Connection
from cdc_assets.postgres.slots import on_standby

# Prepared transactions' locks are among them; neither statement needs a right.
_RUNNING = (
    "select transactionid::text from pg_catalog.pg_locks"
    " where locktype = 'transactionid' and granted"
)

_FLUSHED = (
    "select r, case when r then pg_catalog.pg_last_wal_replay_lsn()"
    " else pg_catalog.pg_current_wal_flush_lsn() end::text"
    " from pg_catalog.pg_is_in_recovery() r"
)
# A commit that is flushed, and with it all that is before it; synchronous standbys have it as well.
FLUSH: LiteralString = (
    "select pg_catalog.set_config('synchronous_commit', 'on', true),"
    " pg_catalog.pg_logical_emit_message(true, 'cdc_assets', '')::text"
)
# Who merely locks a table, and writes nothing, has no id.
_ALTERING = """
select exists (
    select from pg_catalog.pg_locks l
      join pg_catalog.pg_locks x on x.virtualtransaction = l.virtualtransaction
       and x.locktype = 'transactionid' and x.granted
     where l.locktype = 'relation' and l.relation = %s and l.mode = 'AccessExclusiveLock'
       and l.granted and l.database = (
           select oid from pg_catalog.pg_database where datname = pg_catalog.current_database()))
"""


@dataclass(frozen=True, slots=True)
class Horizon:
    """``running``: the ids of all transactions that may have committed below ``lsn`` unseen."""

    lsn: Lsn
    running: frozenset[str]

    @classmethod
    def observe(cls, source: Connection) -> Self:
        """In two statements: what began between them may be among the running.

        A standby shows what committed below its replay LSN, which moves on when a record has been
        replayed: there it is proven at once, and no transaction has a lock on its id.
        """
        # What isn't flushed yet may be lost, and other commits come in its place.
        row = source.execute(_FLUSHED).fetchone()
        assert row is not None
        return cls(Lsn.parse(row[1]), frozenset() if row[0] else running(source))

    def is_proven(self, source: Connection) -> bool:
        """Whether all of them have ended: then what committed below ``lsn`` is visible."""
        return not self.running or self.running.isdisjoint(running(source))


def secured(source: Connection, seconds: float) -> bool:
    """Flush what ``source`` has seen, and wait until synchronous standbys have it, too.

    What a snapshot shows of an asynchronous commit may be lost in a crash. False if it takes longer
    than ``seconds``. A standby shows nothing that isn't flushed, there and at its primary.
    """
    if on_standby(source):
        return True
    late = Event()

    def give_up() -> None:
        late.set()
        source.cancel()  # the wait: the commit, which has nothing but a message, is done

    timer = Timer(seconds, give_up)
    timer.start()
    try:
        source.execute(FLUSH)
    finally:
        timer.cancel()
        timer.join()
    return not late.is_set()


def running(source: Connection) -> frozenset[str]:
    """The ids of the transactions that have written, and that no snapshot shows yet."""
    return frozenset(xid for (xid,) in source.execute(_RUNNING).fetchall())


def is_being_altered(source: Connection, oid: int) -> bool:
    """Whether a transaction that may have altered the table isn't visible yet."""
    row = source.execute(_ALTERING, (oid,)).fetchone()
    return bool(row and row[0])
