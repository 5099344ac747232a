"""Asking every deployment of the source for a mark, by a row of its table of markers."""

from __future__ import annotations

import uuid

import psycopg
from psycopg import sql

from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import ConfigurationError, first_line
from cdc_assets.log.asked.markers import outcome
from cdc_assets.log.store import LogStore
from cdc_assets.postgres.session.connect import Connection

_INSERT = sql.SQL("insert into {} (marker, name) values (%s, %s)")


def publish_marker(source: Connection, config: SourceConfig, name: str) -> str:
    """Insert a marker, and commit; its id. Raises ConfigurationError where that can't be."""
    if (table := config.markers.id) is None:
        raise ConfigurationError(
            "markers.table isn't set: there is no table by which marks are published.",
            "Set it in each deployment's YAML, and make the table: cdc-assets check has the SQL.",
        )
    marker = str(uuid.uuid4())
    try:
        source.execute(_INSERT.format(table.identifier), (marker, name))
    except psycopg.OperationalError:
        raise
    except psycopg.DatabaseError as error:  # a standby's among them
        raise ConfigurationError(
            f"no marker can be inserted into {table}: {first_line(error)}.",
            f"Somebody with the right runs: insert into {table} (name) values ('{name}');"
            f" or: grant insert on {table} to the role of postgres.dsn",
        ) from error
    return marker


def refuse_unmarked(store: LogStore, marker: str) -> None:
    """Raise ConfigurationError unless a marker that the log has passed made a mark."""
    known, refused = outcome(store, marker)
    if refused is not None:
        raise ConfigurationError(refused)
    if not known:
        raise ConfigurationError(
            f"the marker {marker} wasn't in the stream: no mark was made of it.",
            "cdc-assets check says what the table of markers lacks; start the flusher again, with"
            " markers.table, once that is mended.",
        )
