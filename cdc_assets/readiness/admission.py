"""Act on the restart record: refuse to stream, park tables, or start the log anew.

``source.restart_record`` finds the errors. Here the source's errors are raised before a byte is
streamed, tables with an error are parked by name, and once every table is to be copied anew, the
old slot, the log, and the record of the source are dropped.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress

import psycopg

from cdc_assets.config.addresses import replication_dsn
from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import (
    CoordinationError,
    PreflightError,
    ReplicationLost,
    SlotBusy,
    SourceMismatch,
    first_line,
)
from cdc_assets.log.asked.wishes import refuse_if_dropped
from cdc_assets.log.store import LogStore
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.session.connect import Connection
from cdc_assets.postgres.slots import (
    FAILOVER_SLOTS,
    drop_slot,
    make_failover,
    on_standby,
    slot_status,
    system_identifier,
)
from cdc_assets.readiness.source.now import followed, remember, review
from cdc_assets.readiness.source.record import Review, Source
from cdc_assets.relay.first import refuse_other_log

logger = logging.getLogger(__name__)

# How long to wait for the reader of a slot that is of no use any more: a flusher that meets the
# same findings ends within seconds.
_DROP_SECONDS = 30.0
_DROP_LOOK_SECONDS = 0.5


def admit(pipeline: Pipeline) -> Lsn:
    """The LSN to stream from: ``flushed_lsn``, if the source is the one that the log is of.

    Raises SourceMismatch naming every error. Tables with a gap are parked.
    """
    refuse_if_dropped(pipeline.store)
    with pipeline.connect_source("flusher check") as source:
        found = refuse_or_park(source, pipeline.config, pipeline.store, begins=True)
    flushed = pipeline.store.flushed_lsn()
    if flushed is None:
        raise CoordinationError(
            f"source {pipeline.config.name} has a slot but no flushed_lsn: its log has no"
            " beginning.",
            "Run cdc-assets resync --all.",
        )
    remember(pipeline.store, found)
    return flushed


def refuse_or_park(
    source: Connection, config: SourceConfig, store: LogStore, *, begins: bool = False
) -> Source:
    """Raise the source's errors, park the tables with errors of their own.

    ``begins``: a stream does.
    """
    found, now = review(source, config, store, begins=begins)
    found.refuse()
    _park(store, found)
    return now


def refuse_other_cluster(source: Connection, store: LogStore) -> None:
    """Raise SourceMismatch unless the cluster is the known one: all that a copy alone demands."""
    known, found = store.meta("system_identifier"), system_identifier(source)
    if known is None:
        store.set_meta("system_identifier", found)
    elif known != found:
        raise SourceMismatch(
            ["other_cluster"],
            f"source {store.source} is another Postgres cluster (system identifier {found}) than"
            f" the one that was copied ({known}).",
            "Correct postgres.dsn, or give the new cluster a source name of its own.",
        )


def settle(pipeline: Pipeline, source: Connection) -> Source:
    """Like :func:`refuse_or_park`, but begin anew once every table is to be copied again.

    Only one process at a time does that (the caller holds the lock ``pins``).
    """
    config, store = pipeline.config, pipeline.store
    refuse_other_log(config, store)
    while True:
        found, now = _reviewed(source, config, store)
        if not found.errors:
            _park(store, found)
            return now
        configured = {table.id for table in config.tables}
        continued = any(row.table in configured for row in followed(store))
        if continued or store.flushed_lsn() is None or not found.healed_by_copies:
            found.refuse()
        logger.warning(
            "every table is to be copied anew: the log begins again, with a new slot (%s)",
            ", ".join(finding.code for finding in found.errors),
        )
        with pipeline.connect_slots("slot") as slots:
            _drop_slot(slots, config.slot)
        store.begin_anew()


def _reviewed(source: Connection, config: SourceConfig, store: LogStore) -> tuple[Review, Source]:
    try:
        return review(source, config, store, begins=True)
    except ReplicationLost as error:
        # Who copies beside a stream may have no sender left, or need none; `admit` insists on it.
        logger.info("where timelines were left isn't compared: %s", first_line(error))
        return review(source, config, store)


def make_slot_follow_failovers(source: Connection, config: SourceConfig) -> None:
    """Turn an idle slot that an earlier version made into a failover slot."""
    if source.info.server_version < FAILOVER_SLOTS or on_standby(source):
        return
    slot = slot_status(source, config.slot)
    if slot is None or slot.failover or slot.active_pid is not None:
        return
    try:
        make_failover(replication_dsn(config), slot.name)
    except PreflightError as error:  # it streams all the same
        logger.warning("the slot %s isn't a failover slot: %s", slot.name, error)


def _park(store: LogStore, found: Review) -> None:
    for row, finding in found.tables:
        logger.error("parked: %s: %s %s", finding.code, finding.message, finding.remedy)
        said = finding.message.removeprefix(f"{row.table}: ")
        store.park(row.table, f"{finding.code}: {said} {finding.remedy}", row.epoch)
    for row, entry in found.published_as:
        store.set_published_as(row.table, str(entry), epoch=row.epoch)
    for row, row_filter in found.row_filters:
        store.set_row_filter(row.table, row_filter, row.epoch)
    for finding in found.source:
        if finding.severity == "warning":
            logger.warning("%s: %s %s", finding.code, finding.message, finding.remedy)


def _drop_slot(slots: Connection, slot: str) -> None:
    """Drop a slot that no stream can continue from, once it is idle."""
    deadline = time.monotonic() + _DROP_SECONDS
    while True:
        try:
            with suppress(psycopg.errors.UndefinedObject):  # another process was quicker
                drop_slot(slots, slot)
        except psycopg.errors.ObjectInUse as error:
            if time.monotonic() >= deadline:
                raise SlotBusy(
                    f"the slot {slot} has to be made anew, but somebody streams from it"
                    f" ({first_line(error)}).",
                    "Stop that flusher, then try again.",
                ) from error
            time.sleep(_DROP_LOOK_SECONDS)
        else:
            return
