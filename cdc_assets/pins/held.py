"""The pins that one process holds while tables are copied under them, each by a ``holder``."""

from __future__ import annotations

import logging

import psycopg

from cdc_assets.errors import SnapshotLost
from cdc_assets.log.copies.chunks import await_another_pin, restart_copy, unread
from cdc_assets.log.states import TableState
from cdc_assets.log.table_row import TableRow
from cdc_assets.pins.heap_facts import unmoved
from cdc_assets.pins.holders import Holder, held_pins, join_pin, note_released
from cdc_assets.pipeline import Pipeline

logger = logging.getLogger(__name__)


class HeldPins:
    """As many as :func:`len` says; used in one thread, under the lock of pins."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline, self._config = pipeline, pipeline.config
        self._store = pipeline.store
        self._holders: dict[str, Holder] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, holder: Holder) -> None:
        self._holders[holder.pin] = holder

    def close(self) -> None:
        """Let go of every snapshot."""
        for holder in self._holders.values():
            holder.close()
        self._holders.clear()

    def keep(self) -> psycopg.OperationalError | None:
        """Hold the pins of running copies, and restart copies that lost theirs.

        Returns why the server that copies are read from can't be reached; None if it can.
        """
        alive = set[str]()  # pins, which tables share
        copying = unread(self._store, self._store.tables(None, TableState.COPYING))
        held = held_pins(self._store, {row.pin for row in copying if row.pin})
        for row in (row for row in copying if row.pin in held and row.pin not in alive):
            try:
                self._keep(row, alive)
            except psycopg.errors.LockNotAvailable:
                continue  # the next tick looks again
            except psycopg.OperationalError as error:
                return error
        return None

    def release(self) -> None:
        """Let go of the snapshots that no copy needs any more."""
        needed = {row.pin for row in self._store.tables(None, TableState.COPYING)}
        for pin in [pin for pin in self._holders if pin not in needed]:
            self._holders.pop(pin).close()
            note_released(self._store, pin)

    def _keep(self, row: TableRow, alive: set[str]) -> None:
        """Hold the pin that ``row`` is copied under, or have the rest copied under another one.

        ``alive``: the pins that are held, as is known by now.

        Rows that moved between the two snapshots may show up twice or not at all: in a mirror with
        a key their changes since the first pin, which the log has, put that right. The planned
        pages have to be in the same files. The copy begins anew without a key, with other files, or
        where the lake table shows each change: none may be both copied and logged, or missed.
        """
        assert row.pin is not None
        if row.pin in self._holders:
            if self._holders[row.pin].alive():
                alive.add(row.pin)
                return
            self._holders.pop(row.pin).close()
        try:
            self._holders[row.pin] = join_pin(self._store, self._pipeline.copy_dsn, row.pin)
        except SnapshotLost:
            if not unread(self._store, [row]):
                return  # all was read meanwhile
            evened = row.mode == "mirror" and self._config.snapshot.mode == "initial"
            waits = (evened and row.key_columns) or self._config.snapshot.from_ is not None
            if waits and unmoved(self._pipeline, row):
                logger.warning("%s: its pin was lost; the rest is read under another", row.table)
                await_another_pin(self._store, row)
            else:
                logger.warning("%s: its pin was lost while it was copied; copying again", row.table)
                restart_copy(self._store, row, of_pin=row.pin)
