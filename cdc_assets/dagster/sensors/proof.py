"""What the log is proven to have: where the source's WAL ended, and who has reached that. Pure."""

from __future__ import annotations

from cdc_assets.config.source import SourceConfig
from cdc_assets.observe.status import SourceStatus
from cdc_assets.postgres.lsn import PAGE_HEADER_BYTES, Lsn


def source_end(found: SourceStatus) -> Lsn | None:
    """Where the source's WAL ended when ``found`` was collected."""
    for table in found.tables:
        if table.applied_lsn is not None and table.lag_bytes is not None:
            return Lsn(Lsn.parse(table.applied_lsn).value + table.lag_bytes)
    return None


def reaches(flushed: Lsn | None, end: Lsn | None) -> bool:
    """Whether the log holds everything that committed before the WAL ended at ``end``."""
    return flushed is not None and end is not None and end - flushed <= PAGE_HEADER_BYTES


def level_tables(config: SourceConfig, found: SourceStatus, end: Lsn | None) -> frozenset[str]:
    """The tables that the log has up to ``end``, while others hold it up (query mode)."""
    if config.query is None:
        return frozenset()
    return frozenset(
        table.name
        for table in found.tables
        if table.applied_lsn is not None and reaches(Lsn.parse(table.applied_lsn), end)
    )
