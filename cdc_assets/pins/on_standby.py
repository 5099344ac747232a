"""A source that is a hot standby (``postgres.standby``): where its tables' logs begin.

Slot, stream and copies are at the standby; all that is written is the primary's to write. What
differs from a primary, and why it is right:

- *A slot's exported snapshot isn't used.* It shows what committed below the slot's consistent point
  c, but it comes to life only when the decoder has got to c, and replay goes on meanwhile. Until
  then no session has it as its xmin, so replay removes rows that it has to show, as VACUUM did at
  the primary, and nobody is told: a copy would silently lack them (unless
  ``hot_standby_feedback`` was on, and the standby connected, all the time). So the standby is
  copied as a replica is (``pins.elsewhere``): an ordinary snapshot holds its rows from the moment
  that it is taken, and a conflict ends its session. What such a snapshot shows beyond its point,
  the LSN that was replayed before, the log evens out by key in a mirror; for other tables replay is
  stopped for that moment.
- *The making of a slot is the proof* that no transaction is left which had written before a table
  was published, and whose changes aren't streamed (``pins.at_horizon``). A standby has none of the
  locks that tell so at a primary, and its snapshots don't name who runs. A slot that exports waits
  until all transactions have ended that ran at the first record of the primary's running
  transactions which comes after the slot was begun. We have seen the table published before that,
  at this standby, so whoever wrote earlier was among them.
- *What a standby shows ends below the WAL that it has received* (``postgres.slots.current_lsn``):
  a commit is visible before the replay LSN passes it, and no later than it was received.

A standby that is promoted is a primary from then on: later copies are made as of any primary. Its
slot, stream and snapshots go on (``readiness.source.restart_record``).

Source: PostgreSQL, src/backend/replication/logical/snapbuild.c, SnapBuildFindSnapshot and
SnapBuildInitialSnapshot; src/backend/storage/ipc/standby.c, ResolveRecoveryConflictWithSnapshot.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import psycopg

from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import PreflightError, first_line
from cdc_assets.log.table_row import TableRow
from cdc_assets.pins.at_horizon import Proven
from cdc_assets.pins.elsewhere.copies import begin_logs
from cdc_assets.pins.elsewhere.replay import is_stopped, stopped
from cdc_assets.pins.streamed import set_inserts_from
from cdc_assets.pins.taking import look_at
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.session.connect import Connection, connect
from cdc_assets.postgres.slots import (
    LOG_RUNNING,
    NewSlot,
    create_slot,
    export_snapshot,
    on_standby,
)

logger = logging.getLogger(__name__)

# A busy primary logs its running transactions every 15 s, an idle one never.
_HINT_SECONDS = 5.0
# A slot needs two such records at least, each of when the ones of the last have ended.
_AGAIN_SECONDS = 1.0
# Another source of the same standby may have its replay go on in the midst of our stop.
_STOPS = 3


def begin_stream(pipeline: Pipeline, source: Connection, waiting: Sequence[TableRow]) -> None:
    """Make the main slot: the log begins at its point, and so do the logs of the tables.

    Raises SlotBusy or PreflightError.
    """
    config, store = pipeline.config, pipeline.store
    seen = look_at(source, config, waiting)
    point = _point(pipeline, config.slot, temporary=False)
    set_inserts_from(source, config, store, point)
    store.begin_at(point)
    begin_logs(pipeline, source, Proven(point, [*waiting], seen))


def proven_by_slot(
    pipeline: Pipeline, source: Connection, tables: Sequence[TableRow]
) -> Proven | None:
    """Like ``AtHorizon.proven``, by the making of a temporary slot; None at a primary.

    Raises SlotBusy.
    """
    if not tables or not on_standby(source):
        return None
    seen = look_at(source, pipeline.config, tables)
    name = f"{pipeline.config.slot[:50]}_{uuid.uuid4().hex[:8]}"
    return Proven(_point(pipeline, name, temporary=True), [*tables], seen)


def stopped_snapshot(pipeline: Pipeline) -> NewSlot:
    """A snapshot of just what committed below its point, for which replay stops for a moment.

    Raises PreflightError if the role can't have it stop.
    """
    for _ in range(_STOPS):
        with (
            closing(pipeline.connect_source("replay")) as there,
            closing(pipeline.connect_source("replay")) as aside,
            stopped(there, aside) as stands,
        ):
            made = export_snapshot(pipeline.source_dsn) if stands else None
            if made is not None and is_stopped(there, made.consistent_point):
                return made
            if made is not None:
                made.connection.close()
    raise PreflightError(
        "it has to be known to the byte what the standby's snapshot shows, and its replay can't be"
        " stopped for that moment.",
        "On the primary: grant execute on function pg_wal_replay_pause(), pg_wal_replay_resume() to"
        " the role of postgres.dsn.",
    )


def _point(pipeline: Pipeline, name: str, *, temporary: bool) -> Lsn:
    with hurried(pipeline.config):
        made = create_slot(pipeline.replication_dsn, name, temporary=temporary)
    made.connection.close()
    return made.consistent_point


@contextmanager
def hurried(config: SourceConfig) -> Iterator[None]:
    """While a slot is made: have the primary log its running transactions, or a person told to."""
    made = threading.Event()
    helper = threading.Thread(target=_hurry, args=(config, made), name="primary", daemon=True)
    if config.postgres.standby:
        helper.start()
    try:
        yield
    finally:
        made.set()


def _hurry(config: SourceConfig, made: threading.Event) -> None:
    address = config.postgres.primary_dsn
    if made.wait(_AGAIN_SECONDS if address is not None else _HINT_SECONDS):
        return
    if address is None:
        logger.warning(
            "the slot waits for the primary to log its running transactions, which it does at"
            " times unless it is idle. On the primary: %s; -- twice if need be. With"
            " postgres.primary_dsn that is done for you.",
            LOG_RUNNING,
        )
        return
    try:
        called = f"cdc_assets {config.name} slot"
        with connect(address.get_secret_value(), application_name=called) as primary:
            primary.execute(LOG_RUNNING)
            while not made.wait(_AGAIN_SECONDS):
                primary.execute(LOG_RUNNING)
    except psycopg.Error as error:
        logger.warning(
            "the primary can't be asked to log its running transactions, which the slot waits for"
            " (%s): postgres.primary_dsn has to lead to it, and its role needs a right: grant"
            " execute on function pg_log_standby_snapshot() to …;",
            first_line(error),
        )
