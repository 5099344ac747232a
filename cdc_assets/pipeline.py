"""One source, opened: configuration, databases and log, as every engine function takes them.

Nothing here decides anything; it only resolves where things are.
"""

from __future__ import annotations

from typing import Any, Self

import psycopg

from cdc_assets.config.addresses import (
    coordination_dsn,
    copy_dsn,
    replication_dsn,
    source_dsn,
)
from cdc_assets.config.source import SourceConfig
from cdc_assets.log.staged.places import staged_places
from cdc_assets.log.store import LogStore
from cdc_assets.postgres.session.connect import LOCK_SECONDS, ONLY_READS, connect
from cdc_assets.postgres.session.kept import KeptConnection

# An outage that only new sessions meet is noticed by then.
_LOOKS_SECONDS = 300.0


class Pipeline:
    """A source with its log open; a context manager, for one thread."""

    def __init__(self, config: SourceConfig, source_dsn: str, store: LogStore) -> None:
        self.config = config
        self.source_dsn = source_dsn
        self.store = store
        # For what is asked again and again, by ticks.
        self.looks = KeptConnection(lambda: self.connect_source("status"), _LOOKS_SECONDS)

    @classmethod
    def open(cls, config: SourceConfig) -> Self:
        """Connect to the coordination database and migrate it.

        Raises EnvironmentProblem, CoordinationError or psycopg.OperationalError.
        """
        dsn = source_dsn(config)
        store = LogStore.open(coordination_dsn(config), config.name, config.state.schema_)
        store.places = staged_places(config)
        return cls(config, dsn, store)

    def connect_source(self, purpose: str, *, reads: bool = False) -> psycopg.Connection[Any]:
        """An ordinary connection to the source; the caller closes it.

        A connection that ``reads`` a table's rows waits for as long as the table is locked; any
        other raises psycopg.errors.LockNotAvailable after LOCK_SECONDS. Whatever is below a view,
        it writes nothing.
        """
        connection = connect(
            self.source_dsn,
            application_name=f"cdc_assets {self.config.name} {purpose}",
            lock_seconds=None if reads else LOCK_SECONDS,
        )
        if reads:
            connection.execute(ONLY_READS)
        return connection

    @property
    def replication_dsn(self) -> str:
        """The DSN of the role that may make, stream and drop slots."""
        return replication_dsn(self.config)

    @property
    def copy_dsn(self) -> str:
        """The DSN of where first copies are read, which is where their pins are."""
        return copy_dsn(self.config)

    def connect_copy(self, purpose: str) -> psycopg.Connection[Any]:
        """An ordinary connection to where first copies are read; the caller closes it.

        For short questions alone: that server may hang, and nothing else is to wait for it.
        """
        name = f"cdc_assets {self.config.name} {purpose}"
        return connect(
            self.copy_dsn, application_name=name, lock_seconds=LOCK_SECONDS, is_answered=True
        )

    def connect_slots(self, purpose: str) -> psycopg.Connection[Any]:
        """An ordinary connection of the role that may drop slots; the caller closes it."""
        name = f"cdc_assets {self.config.name} {purpose}"
        return connect(self.replication_dsn, application_name=name, lock_seconds=LOCK_SECONDS)

    def close(self) -> None:
        self.looks.close()
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
