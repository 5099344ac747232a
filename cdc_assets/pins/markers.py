"""The table of markers, which is published beside those that are copied, and never is one."""

from __future__ import annotations

import logging

from cdc_assets.config.source import SourceConfig
from cdc_assets.postgres.publication.changing import publish
from cdc_assets.postgres.session.connect import Connection

logger = logging.getLogger(__name__)


def publish_markers(source: Connection, config: SourceConfig) -> None:
    """Add ``markers.table`` to the publication; a warning where that can't be."""
    if (table := config.markers.id) is None:
        return
    found = publish(source, config.publication, [table])
    if table in found.busy:
        logger.warning("no markers are streamed before the flusher starts again: %s is busy", table)
    if (why := found.refused.get(table)) is not None:
        logger.warning("no markers are streamed: %s: %s", table, why)
