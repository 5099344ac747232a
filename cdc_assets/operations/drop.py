"""Giving a source up: its slot and its publication are removed, the lake tables stay as they are.

Of a second lake nothing at the source is its own, and what it held of the first log is let go of.

The source is first recorded as dropped. Who is making its slot is waited for, and nobody begins to
any more. An active flusher sees the record within seconds and ends; then nobody holds the slot.
Resuming the source copies every table anew under a new slot.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import psycopg
from psycopg import sql

from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import ConfigurationError, SlotBusy, first_line
from cdc_assets.log.asked.wishes import DROPPED
from cdc_assets.log.copies.chunks import restart_copy
from cdc_assets.log.locks import PINS_LOCK
from cdc_assets.log.staged.places import staged_files, staged_places
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.publication.contents import inserts_publication, publication_oid
from cdc_assets.postgres.slots import SLOT_PATIENCE_SECONDS, drop_slot, on_standby, slot_status
from cdc_assets.relay.first import hold_nothing, refuse_other_log

# Who makes a slot gives up before that.
_PINS_SECONDS = SLOT_PATIENCE_SECONDS + 30.0
# A flusher looks every few seconds; the server ends a session that hangs or isn't ours.
_PATIENCE_SECONDS, _LONGEST_SECONDS, _LOOK_SECONDS = 30.0, 60.0, 0.5


@dataclass(frozen=True, slots=True)
class Dropped:
    """What was removed at the source, by name; None where there was nothing of that name.

    ``refused``: what the owner of a publication that is somebody else's has to do, with the SQL.
    ``files``, ``bytes``: of staged changes.
    """

    slot: str | None
    publication: str | None
    refused: tuple[str, ...] = ()
    files: int = 0
    bytes: int = 0


def refuse_unmeant(config: SourceConfig, named: str | None, remedy: str) -> None:
    """Raise ConfigurationError, which says what is removed, unless the source's name was given."""
    if named != config.name:
        removed = f"the slot {config.slot} and the publication {config.publication}"
        raise ConfigurationError(
            f"this removes {removed if config.decodes else 'the log'}.", remedy
        )


def drop_source(pipeline: Pipeline, *, files: bool = False) -> Dropped:
    """Remove slot and publication; with ``files``, the staged changes, too.

    If it was done half, another call does the rest. Raises SlotBusy if the slot stays in use, or is
    being made, and SourceMismatch if what the log holds isn't what the configuration has.
    """
    store, config = pipeline.store, pipeline.config
    refuse_other_log(config, store)
    store.connection.execute(
        "insert into pipeline_meta (source, key, value) values (%s, %s, clock_timestamp()::text)"
        " on conflict do nothing",
        (config.name, DROPPED),
    )
    # Who makes a slot has it; from now on they refuse.
    if not store.lock_within(PINS_LOCK, _PINS_SECONDS):
        raise SlotBusy(
            f"a pin of {config.name} is being made, which waits for transactions at the source.",
            "Nothing was removed yet: drop the source again; status says what it waits for.",
        )
    store.unlock(PINS_LOCK)
    whose = "somebody else's"
    with pipeline.connect_source("drop") as source:
        if on_standby(source):
            whose = "its primary's, where it stays and costs nothing, unless it is dropped"
        slot = config.slot if slot_status(source, config.slot) is not None else None
        if config.decodes:
            with pipeline.connect_slots("drop") as slots:
                _drop_slot(slots, config.slot)
        with store.locked(PINS_LOCK):
            for row in store.tables():
                restart_copy(store, row)
            store.begin_anew()
            if config.log is not None:
                hold_nothing(store, config.log)
        publication = None
        if config.decodes and publication_oid(source, config.publication) is not None:
            publication = config.publication
        kept = []
        both = (config.publication, inserts_publication(config.publication))
        for name in both if config.decodes else ():
            statement = sql.SQL("drop publication if exists {}").format(sql.Identifier(name))
            try:
                source.execute(statement)
            except psycopg.errors.ReadOnlySqlTransaction:
                if publication_oid(source, name) is not None:
                    kept.append(statement.as_string(source))
            except psycopg.errors.InsufficientPrivilege:
                kept.append(statement.as_string(source))
    count, size = _remove_staged(config) if files else (0, 0)
    if not kept:
        return Dropped(slot, publication, files=count, bytes=size)
    said = f"The publication {config.publication} is {whose}: {'; '.join(kept)}; -- as its owner"
    return Dropped(slot, None, (said,), count, size)


def _remove_staged(config: SourceConfig) -> tuple[int, int]:
    """Delete the staged files, none of which the log names any more; their number and bytes."""
    count = size = 0
    for place in staged_places(config):
        found = [info.path for info in staged_files(place)]
        done = place.delete(found)
        count, size = count + done[0], size + done[1]
        folders = {str(parent) for path in found for parent in PurePosixPath(path).parents}
        place.delete_empty(folders)
    return count, size


def _drop_slot(slots: psycopg.Connection[Any], slot: str) -> None:
    began = time.monotonic()
    while True:
        try:
            with suppress(psycopg.errors.UndefinedObject):  # somebody was quicker
                drop_slot(slots, slot)
        except psycopg.errors.ObjectInUse as error:
            waited = time.monotonic() - began
            if waited >= _LONGEST_SECONDS:
                raise SlotBusy(
                    f"the slot {slot} is in use ({first_line(error)}).",
                    "Stop who streams from it, then drop the source again.",
                ) from error
            if waited >= _PATIENCE_SECONDS:
                slots.execute(
                    "select pg_terminate_backend(active_pid)"
                    " from pg_catalog.pg_replication_slots where slot_name = %s",
                    (slot,),
                )
            time.sleep(_LOOK_SECONDS)
        else:
            return
