"""Where a source's databases are, and which of its tables a command is for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from cdc_assets.config.source import SourceConfig
from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.errors import EnvironmentProblem
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.session.connect import of_standby
from cdc_assets.process.home import home


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
        given = config.postgres.dsn.get_secret_value()
        return of_standby(given) if config.postgres.standby or config.query is not None else given
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


def copy_dsn(config: SourceConfig) -> str:
    """Where first copies are read: ``snapshot.from``, or the source."""
    other = config.snapshot.from_
    if other is None or other.dsn is None:  # a dump that isn't there yet
        return source_dsn(config)
    return other.dsn.get_secret_value()


def copy_replication_dsn(config: SourceConfig) -> str:
    """The same, of the role that may replicate."""
    other = config.snapshot.from_
    if other is None:
        return replication_dsn(config)
    given = other.replication_dsn
    return given.get_secret_value() if given is not None else copy_dsn(config)


def coordination_dsn(config: SourceConfig) -> str:
    """Where the coordination schema is: the source, unless ``state.postgres_url`` moves it."""
    url = config.state.postgres_url
    return url.get_secret_value() if url is not None else source_dsn(config)


@contextmanager
def services(config: SourceConfig) -> Iterator[None]:
    """Run the embedded Postgres, if the source is one, while the context lasts.

    A server that was running already goes on; one that is started here is stopped here.
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


def all_at_the_source(config: SourceConfig) -> bool:
    """Whether log and catalog are in the source's own database."""
    catalog = config.lake.catalog
    return config.state.postgres_url is None and catalog.type == "sql" and catalog.uri is None
