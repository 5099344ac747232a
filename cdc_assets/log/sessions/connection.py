"""A connection to the coordination schema, by a source's configuration."""

from __future__ import annotations

from typing import Any

import psycopg

from cdc_assets.config.addresses import coordination_dsn
from cdc_assets.config.source import SourceConfig
from cdc_assets.log.session import enter
from cdc_assets.postgres.session.connect import connect


def connect_log(config: SourceConfig, purpose: str) -> psycopg.Connection[Any]:
    """A connection of its own to the coordination schema, for what isn't a :class:`LogStore`'s.

    Neither creates nor migrates the schema. Raises CoordinationError if the log was moved away.
    """
    name = f"cdc_assets {config.name} {purpose}"
    connection = connect(coordination_dsn(config), application_name=name)
    try:
        enter(connection, config.state.schema_, config.name)
    except BaseException:
        connection.close()
        raise
    return connection
