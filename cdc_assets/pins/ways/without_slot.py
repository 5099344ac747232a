"""Sources without a slot of their own: they are queried, or have another source's log (``relay``).

A table of a second lake is pinned as any other that comes after the slot: by a temporary slot, a
lock, or at a horizon. None of these need the stream; what they need is a log of the table that has
whatever commits at the pin's point or above, and ``relay.beginning`` sees to that before.
"""

from __future__ import annotations

from collections.abc import Sequence

from cdc_assets.config.source import SourceConfig
from cdc_assets.log.store import LogStore
from cdc_assets.log.table_row import TableRow
from cdc_assets.pins.enrol import as_published, register_tables
from cdc_assets.pins.ways.queried import begin_queries
from cdc_assets.postgres.session.connect import Connection
from cdc_assets.readiness.admission import refuse_other_cluster
from cdc_assets.readiness.source.now import followed
from cdc_assets.relay.beginning import begin_relay, begin_tables
from cdc_assets.relay.first import refuse_other_log


def begin_without_slot(source: Connection, config: SourceConfig, store: LogStore) -> None:
    """Register the tables, and give the log its beginning. Raises SourceMismatch."""
    refuse_other_log(config, store)
    if config.log is not None and not followed(store):
        store.forget_meta("system_identifier")  # the first source may have moved, and all is anew
    refuse_other_cluster(source, store)
    register_tables(source, config, store)
    begin_queries(source, config, store)
    begin_relay(config, store)


def relayed(
    source: Connection, config: SourceConfig, store: LogStore, waiting: Sequence[TableRow]
) -> list[TableRow]:
    """Those of a second lake's ``waiting`` tables that may be pinned now. Raises SourceMismatch."""
    rows = begin_tables(config, store, [row for row in waiting if row.oid])
    return as_published(source, config, rows)
