"""Which tables are due for care: those that changed, and in any case some hours after the last.

Care of a table of which nothing changed finds nothing but what time brings: snapshots that grow too
old, staged files and orphans whose grace is over, comments of the source, and what others did to
the table. Each round over 500 quiet tables would cost minutes of CPU, and megabytes of Dagster's
event log.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import timedelta

from cdc_assets.log.verified import cared_at_rest, remember_care
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId

# As often as orphans are looked for.
REST = timedelta(days=1)


def due(pipeline: Pipeline, tables: Sequence[TableId]) -> list[TableId]:
    """Those of ``tables`` that are due."""
    resting = cared_at_rest(pipeline.store)
    return [table for table in tables if resting.get(table) != _settings(pipeline, table)]


def let_rest(pipeline: Pipeline, table: TableId, saw: str, snapshots: int) -> None:
    """Record that care of a table is through, of the version that it ``saw`` when it began.

    ``snapshots``: how many it left, without those that tags keep. Those that are too many, and too
    young to be removed, are once they are old enough.
    """
    keep = pipeline.config.maintenance.keep_snapshots
    rest = min(REST, keep.age) if snapshots > keep.count else REST
    settings = _settings(pipeline, table)
    remember_care(pipeline.store, table, saw, pipeline.store.server_now() + rest, settings)


def _settings(pipeline: Pipeline, table: TableId) -> str:
    """A hash of what the configuration says of a table's layout and care."""
    config = pipeline.config
    said = [part.model_dump_json() for part in (config.lake, config.maintenance)]
    said.append(config.table(table).model_dump_json())
    return hashlib.sha256("".join(said).encode()).hexdigest()[:16]
