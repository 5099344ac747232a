"""Reading the log beside the lake: what a program follows, as one of a consumer group."""

from cdc_assets.consumers.events import (
    ROW_COLUMNS,
    Begin,
    Changes,
    Event,
    Schema,
    SnapshotEnd,
    SnapshotRows,
    Truncate,
)
from cdc_assets.consumers.stream import Stream, follow
from cdc_assets.errors import Fenced

__all__ = [
    "ROW_COLUMNS",
    "Begin",
    "Changes",
    "Event",
    "Fenced",
    "Schema",
    "SnapshotEnd",
    "SnapshotRows",
    "Stream",
    "Truncate",
    "follow",
]
