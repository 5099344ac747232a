"""What query mode can't do, and says at once instead of doing it wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from cdc_assets.errors import ConfigurationError

if TYPE_CHECKING:
    from cdc_assets.config.source import SourceConfig
    from cdc_assets.config.tables import TableConfig


def refuse_in_query_mode(config: SourceConfig) -> None:
    """Raise ValueError for the first setting that needs a slot; without query mode, one of it."""
    tables = (*config.tables, *config.patterns)
    if config.query is None:
        for table in tables:
            if table.watermark is not None:
                raise ValueError(
                    f"tables: {table.name} has a watermark, which query mode alone reads; add"
                    " query: {}, or remove it"
                )
            if table.key:
                raise ValueError(
                    f"tables: {table.name} has key:, which query mode alone reads: a slot tells"
                    " rows apart by their REPLICA IDENTITY; remove it"
                )
        return
    for wrong in _settings(config):
        raise ValueError(wrong)
    for table in tables:
        for wrong in _of_table(config, table):
            raise ValueError(f"tables: {table.name}: {wrong}")


def refuse_queried(config: SourceConfig, what: str) -> None:
    """Raise ConfigurationError for what needs one LSN, at which source and log are the same."""
    if config.query is not None:
        raise ConfigurationError(
            f"{what} needs one LSN up to which source and log have the same changes, and in query"
            " mode there is none.",
            "cdc-assets backfill S.T --replace reads a table again, and leaves the lake no row that"
            " the source doesn't have.",
        )


def _settings(config: SourceConfig) -> Iterator[str]:
    if config.snapshot.mode != "initial":
        yield "query: it goes with snapshot.mode: initial, whose changes are then queried"
    if config.slot or config.publication:
        yield "slot and publication: query mode has none; remove them"
    if config.postgres.replication_dsn is not None:
        yield "postgres.replication_dsn: query mode makes no slot; remove it"
    if config.postgres.standby:
        yield "postgres.standby: it has a slot made there, and query mode makes none; remove it"
    if config.markers.table is not None:
        yield "markers.table: a marker is a commit of the log, and queries find none; remove it"
    if config.snapshot.from_ is not None:
        yield (
            "snapshot.from: query mode copies where it queries, as no log tells what happened"
            " between two servers; give the replica as postgres.dsn"
        )
    if config.snapshot.strategy == "incremental":
        yield "snapshot.strategy: query mode copies under one snapshot; remove it"
    if config.snapshot.pin == "lock":
        yield "snapshot.pin: query mode needs neither a slot nor a lock for a pin; remove it"
    if config.marks.every is not None:
        yield "marks.every: a mark is one LSN of the log, and queries find changes at none"
    if config.backfills.signals is not None:
        yield "backfills.signals: rows of that table come by a slot; use the coordination schema's"


def _of_table(config: SourceConfig, table: TableConfig) -> Iterator[str]:
    assert config.query is not None
    if table.watermark is None:
        yield (
            "watermark: missing; query mode finds changes by a column that each of them sets"
            " anew, such as watermark: {column: updated_at}"
        )
    elif table.watermark.column in (*table.columns.exclude, *table.columns.mask):
        yield "watermark: its column is excluded or masked; choose one that is read as it is"
    if len({*table.key}) < len(table.key):
        yield "key: it names a column twice"
    if table.mode == "append":
        yield (
            "mode: append keeps each change, and queries find states: what happened between two of"
            " them isn't seen. Take mirror or soft_delete"
        )
    if table.adopt is not None:
        yield "adopt: it needs a log of changes from a position on, which query mode hasn't"
    if table.where is not None:
        yield "where: a row that leaves the condition shows no change; query mode takes none"
    if table.only:
        yield "only: query mode takes whole tables"
    if table.strategy == "incremental" or table.pin == "lock":
        yield "strategy and pin: query mode copies under one snapshot without a slot; remove them"
    if config.query.every >= table.freshness.warn:
        yield "freshness.warn: it has to be longer than query.every"
