"""One source, opened: configuration, databases and log, as every engine function takes them.

Nothing here decides anything; it only resolves where things are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import psycopg

from cdc_assets.config import SourceConfig, home
from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.errors import EnvironmentProblem
from cdc_assets.log.places import staged_places
from cdc_assets.log.session import enter
from cdc_assets.log.store import LogStore
from cdc_assets.postgres.connect import LOCK_SECONDS, connect
from cdc_assets.postgres.names import TableId


def embedded_postgres(config: SourceConfig) -> EmbeddedPostgres:
    """The throw-away Postgres of a source with ``embedded: true``."""
    return EmbeddedPostgres(
        home() / config.name / "postgres",
        version=config.postgres.version,
        settings={"max_slot_wal_keep_size": "16GB"},  # as `check` wants it of every source
    )


def source_dsn(config: SourceConfig) -> str:
    """Where the source is; raises EnvironmentProblem if it is embedded and doesn't run."""
    if config.postgres.dsn is not None:
        return config.postgres.dsn.get_secret_value()
    dsn = embedded_postgres(config).dsn()
    if dsn is None:
        raise EnvironmentProblem(
            f"the embedded Postgres of source {config.name} isn't running.",
            "dagster dev starts it within seconds; the cdc-assets commands start it themselves.",
        )
    return dsn


def replication_dsn(config: SourceConfig) -> str:
    """Where the slot is made and streamed from: ``postgres.replication_dsn``, or the source's."""
    given = config.postgres.replication_dsn
    return given.get_secret_value() if given is not None else source_dsn(config)


def coordination_dsn(config: SourceConfig) -> str:
    """Where the coordination schema is: the source, unless ``state.postgres_url`` moves it."""
    url = config.state.postgres_url
    return url.get_secret_value() if url is not None else source_dsn(config)


def connect_log(config: SourceConfig, purpose: str) -> psycopg.Connection[Any]:
    """A connection of its own to the coordination schema, for what isn't a :class:`LogStore`'s.

    Neither creates nor migrates the schema.
    """
    name = f"cdc_assets {config.name} {purpose}"
    connection = connect(coordination_dsn(config), application_name=name)
    enter(connection, config.state.schema_)
    return connection


@contextmanager
def services(config: SourceConfig) -> Iterator[None]:
    """While it lasts, what the commands need is there: the embedded Postgres, if it is one.

    What was running already goes on; what is started here is stopped here.
    """
    if not config.postgres.embedded or embedded_postgres(config).dsn() is not None:
        yield
        return
    with embedded_postgres(config):
        yield


def selected(config: SourceConfig, names: Sequence[str]) -> list[TableId]:
    """The tables that ``--table`` names, or all; ConfigurationError for one that isn't there."""
    if not names:
        return [table.id for table in config.tables]
    return list(dict.fromkeys(config.table(name).id for name in names))


class Pipeline:
    """A source with its log open; a context manager, for one thread."""

    def __init__(self, config: SourceConfig, source_dsn: str, store: LogStore) -> None:
        self.config = config
        self.source_dsn = source_dsn
        self.store = store

    @classmethod
    def open(cls, config: SourceConfig) -> Self:
        """Connect to the coordination database and migrate it.

        Raises EnvironmentProblem, CoordinationError or psycopg.OperationalError.
        """
        dsn = source_dsn(config)
        store = LogStore.open(coordination_dsn(config), config.name, config.state.schema_)
        store.places = staged_places(config)
        return cls(config, dsn, store)

    @property
    def staging_uri(self) -> str:
        return self.config.staging_uri

    def connect_source(self, purpose: str, *, reads: bool = False) -> psycopg.Connection[Any]:
        """An ordinary connection to the source; the caller closes it.

        One that ``reads`` a table's rows waits for as long as that is locked; any other raises
        psycopg.errors.LockNotAvailable instead, after LOCK_SECONDS.
        """
        return connect(
            self.source_dsn,
            application_name=f"cdc_assets {self.config.name} {purpose}",
            lock_seconds=None if reads else LOCK_SECONDS,
        )

    @property
    def replication_dsn(self) -> str:
        """Of the role that may make, stream and drop slots."""
        return replication_dsn(self.config)

    def connect_slots(self, purpose: str) -> psycopg.Connection[Any]:
        """An ordinary connection of the role that may drop slots; the caller closes it."""
        name = f"cdc_assets {self.config.name} {purpose}"
        return connect(self.replication_dsn, application_name=name, lock_seconds=LOCK_SECONDS)

    def close(self) -> None:
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
