"""What a second lake demands of the source whose log it gets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import CoordinationError, SourceMismatch, TableProblem
from cdc_assets.log.states import TableState
from cdc_assets.log.store import LogStore
from cdc_assets.log.table_row import TableRow
from cdc_assets.masks import rules_of
from cdc_assets.messages.findings import Finding
from cdc_assets.postgres.catalog import SourceTable
from cdc_assets.postgres.names import TableId
from cdc_assets.relay.first import (
    first_log,
    refuse_other_log,
    staged_otherwise,
    why_of_another,
    why_unlogged,
)


def log_findings(
    config: SourceConfig,
    store: LogStore | None,
    tables: Mapping[TableId, SourceTable | TableProblem],
) -> Iterator[Finding]:
    """Whether the first source has a log, and stages what this one asks for.

    Of a source that has none of another's: whether it has let go of it.
    """
    if store is None:
        return
    try:
        refuse_other_log(config, store)
        if config.log is None:
            return
        of, first = config.log.of, first_log(config, store)
    except SourceMismatch as error:
        yield Finding(error.codes[0], "error", error.what, error.remedy)
        return
    except CoordinationError as error:
        yield Finding("state_moved", "error", error.what, error.remedy)
        return
    if first.flushed_lsn() is None:
        yield Finding(
            "log_missing",
            "warning",
            f"this coordination schema has no log of source {of} yet, which this lake is to get.",
            f"Start {of}; both need the same state.postgres_url and state.schema.",
        )
        return
    yield Finding("log_of", "info", f"its log is that of source {of}.", "")
    there = {row.table: row for row in first.tables()}
    for table in config.tables:
        theirs, found = there.get(table.id), tables.get(table.id)
        if theirs is None or not theirs.oid:
            said = f"{table.name} waits: {why_unlogged(of, theirs)}"
            yield Finding("log_lacks_table", "warning", said, "", table.name)
        elif isinstance(found, SourceTable) and found.oid != theirs.oid:
            said = f"{table.name} waits: {why_of_another(of)}"
            yield Finding("log_lacks_table", "warning", said, "", table.name)
        elif isinstance(found, SourceTable):
            ours = TableRow(
                table.id,
                found.oid,
                *(0, TableState.WAITING, found.key_columns, found.columns, None, None, None, None),
                excluded=frozenset(table.columns.exclude),
                mode=table.mode or "mirror",
                masks=rules_of(config.masks(table.id) or {}),
                filter_wanted=config.row_filters.get(table.id),
            )
            if (wrong := staged_otherwise(of, ours, theirs)) is not None:
                yield Finding("log_differs", "error", wrong.what, wrong.remedy, table.name)
