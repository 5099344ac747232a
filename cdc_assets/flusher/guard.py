"""Keeps the source's own statements from failing because of us while we stream.

A published table can lose what identifies its rows at any moment: its key is dropped, its replica
identity becomes nothing, a partition without one is attached. From then on Postgres refuses every
UPDATE and DELETE there until the table is out of the publication. So every GUARD_SECONDS each
published table is checked (``postgres.identity``). A table whose changes Postgres refuses is
parked and withdrawn; one that can't be streamed any longer is parked. The reason has the remedy.

The guard is a thread with connections of its own, because other work of the flusher may wait for
minutes. It waits for nothing itself: a look reads catalogs only, and a withdrawal that a lock
prevents is tried again at the next look.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

import psycopg

from cdc_assets.config.source import SourceConfig
from cdc_assets.log.states import TableState
from cdc_assets.log.store import LogStore
from cdc_assets.messages.texts import command
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.publication.changing import withdraw
from cdc_assets.postgres.publication.contents import column_lists, published_tables, row_filters
from cdc_assets.postgres.publication.identity import children, remedy, sentence, unidentified
from cdc_assets.postgres.publication.statements import addition
from cdc_assets.readiness.source.enrolment import OR_INSERTS, inherited

logger = logging.getLogger(__name__)

# How long the source's statements may fail …
GUARD_SECONDS = 2.0
# … but looks take at most this share of the time; a look costs some 50 µs a heap, in two queries.
# A withdrawal's wait for a lock doesn't count: it costs the source nothing.
GUARD_SHARE = 0.05
# After a failure; the databases may be down.
_LATER_SECONDS = 10.0
# A look that takes longer is out of date.
_TIMEOUT = "10s"
# The end of the flusher doesn't wait for a database that doesn't answer.
_JOIN_SECONDS = 3.0


class Guard:
    """Looks as soon as it is started, and from then on until it is closed."""

    def __init__(self, config: SourceConfig) -> None:
        self._config = config
        self._said: dict[TableId, str] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="guard", daemon=True)

    def start(self) -> None:
        if self._config.decodes:  # else nothing is published
            self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with (
                    Pipeline.open(self._config) as pipeline,
                    pipeline.connect_source("guard") as source,
                ):
                    for session in (source, pipeline.store.connection):
                        session.execute(f"set statement_timeout = '{_TIMEOUT}'")
                    while not self._stop.is_set():
                        took = guard(source, self._config, pipeline.store, self._said)
                        self._stop.wait(max(GUARD_SECONDS, took / GUARD_SHARE))
            except Exception as error:  # noqa: BLE001 - without it the source's writes may stop
                logger.warning("the published tables weren't looked at: %s", error)
                self._stop.wait(_LATER_SECONDS)


def guard(
    source: psycopg.Connection[Any],
    config: SourceConfig,
    store: LogStore,
    said: dict[TableId, str] | None = None,
) -> float:
    """One look: park and withdraw what Postgres refuses, park what can't be streamed any longer.

    ``said``: the last text logged of each table, so that each is logged once. Returns how many
    seconds the queries of the source took.
    """
    began = time.monotonic()
    publication = config.publication
    published = published_tables(source, publication) or {}
    refused, reasons, heirs = _judge(source, config, published)
    took = time.monotonic() - began
    if not reasons:
        return took
    rows = {row.table: row for row in store.tables()}
    oids = {row.oid for row in rows.values()}  # a table may have been renamed
    for table, why in reasons.items():
        # One that is parked keeps its reason, as it needs a re-sync in any case.
        if (row := rows.get(table)) is not None and row.state != TableState.PARKED:
            store.park(table, why, row.epoch)
    # Other tables of a user-made publication are for its owner to withdraw.
    ours = rows.keys() | heirs | {t for t, oid in published.items() if oid in oids}
    if config.markers.id is not None:
        ours |= {config.markers.id}
    left = withdraw(source, publication, [table for table in refused if table in ours])
    for table, why in reasons.items():
        text = f"{why}. {left.refused.get(table, '')}".strip()
        if said is None or said.get(table) != text:
            logger.error("%s: %s", table, text)
        if said is not None:
            said[table] = text
    return took


def _judge(
    source: psycopg.Connection[Any], config: SourceConfig, published: Mapping[TableId, int]
) -> tuple[list[TableId], dict[TableId, str], set[TableId]]:
    """Tables whose changes Postgres refuses, the reason to park each, and all child tables."""
    wrong = unidentified(source, config.publication, [*published.values()])
    inherit = children(source, published.values())
    only = {table.id for table in config.tables if table.only}
    refused = [t for t, oid in published.items() if any(w.refused for w in wrong.get(oid, ()))]
    oids = {t: published[t] for t in refused}
    lists = column_lists(source, config.publication, oids)
    found = row_filters(source, config.publication, [*oids.values()])
    filters = {t: found[oid] for t, oid in oids.items() if oid in found}
    reasons = {}
    for table, oid in published.items():
        if oid in wrong:
            way_out = f"{remedy(wrong[oid])} {OR_INSERTS};"
            if table in lists:
                lists[table] += sorted({c for w in wrong[oid] for c in w.unlisted})
                again = addition(source, config.publication, [table], lists, filters)
                way_out += f" then, or every column is sent: {again};"
            reasons[table] = (
                f"{sentence(table, wrong[oid])}. {way_out} then {command('resync', table)}"
            )
        elif oid in inherit and table not in only:
            problem = inherited(table, inherit[oid])
            reasons[table] = str(problem).removeprefix(f"{table}: ").rstrip(".")
    return refused, reasons, {heir for found in inherit.values() for heir in found}
