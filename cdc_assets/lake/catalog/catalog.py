"""The Iceberg catalog, as Spark and pyiceberg open it.

Both take their settings from one configuration, so that they can't drift apart. The default catalog
is ``iceberg_tables`` in the coordination Postgres: Iceberg's JDBC catalog and pyiceberg's
SqlCatalog read each other's tables. pyiceberg creates them, because it looks for them along its
search path; the JDBC catalog accepts any in the database. Passwords go into a session's settings,
never onto a command line.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

import psycopg
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from sqlalchemy import text
from sqlalchemy.engine import URL
from sqlalchemy.exc import IntegrityError, OperationalError
from tenacity import retry, retry_if_exception_type, stop_after_attempt

from cdc_assets.config.addresses import coordination_dsn
from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import EnvironmentProblem, first_line
from cdc_assets.lake.catalog import place as catalog_place
from cdc_assets.lake.catalog.files import file_io
from cdc_assets.lake.catalog.parsed import ParsedOnce
from cdc_assets.lake.catalog.place import catalog_schema, make_schema, refuse_foreign_schema
from cdc_assets.log.schema.versions import search_path, sql_name
from cdc_assets.log.staged.storage import S3_CONNECT_SECONDS, S3_REQUEST_SECONDS
from cdc_assets.postgres.session.connect import NO_TIMEOUTS, connect
from cdc_assets.postgres.session.jdbc import jdbc
from cdc_assets.postgres.session.parameters import SECRET, resolved
from cdc_assets.postgres.session.tls import TlsProblem, tls_problem

CATALOG = catalog_place.CATALOG

# A role's time-outs are meant for its applications.
_NO_TIMEOUTS = " ".join(f"-c {key}={value}" for key, value in NO_TIMEOUTS.items())

_KEY = {
    "s3.access-key-id": "AWS_ACCESS_KEY_ID",
    "s3.secret-access-key": "AWS_SECRET_ACCESS_KEY",
    "s3.session-token": "AWS_SESSION_TOKEN",
}

# Manifests never change, and each statement reads all of a table's: 20 requests a merge less.
_CACHED = {"io.manifest.cache-enabled": "true", "io.manifest.cache.max-total-bytes": str(2**24)}

# Spark's connections to a SQL catalog end after so long without a statement; a later one makes a
# new connection.
IDLE_SECONDS = 300
# The setting, and the version since which Postgres has it.
_IDLE_TIMEOUT, _ENDS_IDLE = "idle_session_timeout", 140000


def catalog_dsn(config: SourceConfig) -> str:
    """The SQL catalog's address as libpq has it; by default the coordination database's."""
    given = config.lake.catalog.uri
    dsn = given.get_secret_value() if given is not None else coordination_dsn(config)
    return dsn.replace("postgresql+psycopg://", "postgresql://")


def _parameters(config: SourceConfig) -> dict[str, str]:
    return {key: value for key, value in resolved(catalog_dsn(config)).items() if value}


def _place(config: SourceConfig) -> str:
    """The options of a connection that make it find the catalog's tables; maybe none."""
    with reached():
        schema = catalog_schema(config)
    given = _parameters(config).get("options", "")
    if schema is None:
        return given
    path = search_path(schema).replace("\\", r"\\").replace(" ", r"\ ")
    return f"{given} -c search_path={path}".strip()


def sql_catalog_uri(config: SourceConfig) -> URL:
    """The SQL catalog's address as SQLAlchemy has it; ``render_as_string`` hides the password."""
    query = _parameters(config)
    if place := _place(config):
        query["options"] = place
    user, password = query.pop("user", None), query.pop("password", None)
    host, port = query.pop("host", "localhost"), query.pop("port", "5432")
    if "," in host or "," in port:  # SQLAlchemy takes several hosts with as many ports
        ports = port.split(",") * (host.count(",") + 1 if "," not in port else 1)
        query |= {"host": host, "port": ",".join(ports)}
    elif host.startswith(("/", "@")):
        query |= {"host": host, "port": port}
    several = "host" in query
    return URL.create(
        "postgresql+psycopg",
        username=user,
        password=password,
        host=None if several else host,
        port=None if several else int(port),
        database=query.pop("dbname", user),
        query=query,
    )


def _options(config: SourceConfig) -> str:
    return f"{_place(config)} {_NO_TIMEOUTS}".strip()


def _jdbc_settings(config: SourceConfig) -> dict[str, str]:
    """The SQL catalog's part of the settings. Raises ConfigurationError for what JDBC lacks."""
    address, properties = jdbc(_parameters(config))
    properties["options"] = f"{_options(config)} {_idle_option(config)}".strip()
    return {
        "type": "jdbc",
        "uri": address,
        **{f"jdbc.{key}": value for key, value in properties.items()},
        "jdbc.init-catalog-tables": "false",
        # A pooled connection that the server ended meanwhile is replaced, not an error.
        "retryable_status_codes": "57P01,57P05",
    }


def _idle_option(config: SourceConfig) -> str:
    """The option by which the catalog's server ends a connection that idles.

    The connections of a session that was closed stay until the JVM has collected it, which may take
    half an hour: a hundred commands would take all that the server has. Empty before Postgres 14,
    if it is away, or where the catalog's address says so itself.
    """
    if _IDLE_TIMEOUT in _parameters(config).get("options", ""):
        return ""
    try:
        knows = _ends_idle(catalog_dsn(config))
    except psycopg.Error:
        return ""
    return f"-c {_IDLE_TIMEOUT}={IDLE_SECONDS}s" if knows else ""


@lru_cache(maxsize=16)
def _ends_idle(dsn: str) -> bool:
    with connect(dsn, application_name="cdc_assets catalog") as connection:
        return connection.info.server_version >= _ENDS_IDLE


def refuse_for_jdbc(config: SourceConfig) -> None:
    """Raise ConfigurationError if the SQL catalog's address makes demands that JDBC can't meet."""
    if config.lake.catalog.type == "sql":
        jdbc(_parameters(config))


def spark_settings(config: SourceConfig) -> dict[str, str]:
    """Session settings that make the catalog ``lake`` known to Spark."""
    prefix = f"spark.sql.catalog.{CATALOG}"
    settings = {
        prefix: "org.apache.iceberg.spark.SparkCatalog",
        # A cached table would hide what another process committed.
        f"{prefix}.cache-enabled": "false",
        f"{prefix}.warehouse": config.warehouse,
    }
    kind = config.lake.catalog.type
    if kind == "sql":
        settings |= {f"{prefix}.{key}": value for key, value in _jdbc_settings(config).items()}
    else:
        settings[f"{prefix}.type"] = kind
        if config.lake.catalog.uri is not None:
            settings[f"{prefix}.uri"] = config.lake.catalog.uri.get_secret_value()
    if config.warehouse.startswith("s3://"):
        settings[f"{prefix}.io-impl"] = "org.apache.iceberg.aws.s3.S3FileIO"
    more = {**_s3(config), **_more(config)}
    if "credential" in more:  # which gets the next token: not every server exchanges the last one
        more = {"token-exchange-enabled": "false", **more}
    return settings | {f"{prefix}.{key}": value for key, value in more.items()}


def _may_be_in_s3(config: SourceConfig) -> bool:
    """A warehouse of S3, or one that only its catalog knows the place of."""
    return config.warehouse.startswith("s3://") or ":/" not in config.warehouse


def _s3(config: SourceConfig) -> dict[str, str]:
    """What Spark is told of S3."""
    if not _may_be_in_s3(config):
        return {}
    given = {**_CACHED, **config.s3.key}
    if config.s3.path_style or config.warehouse.startswith("s3://"):  # else a catalog may say it
        given["s3.path-style-access"] = str(config.s3.path_style).lower()
    if config.s3.endpoint:
        given["s3.endpoint"] = config.s3.endpoint
    if config.s3.region:
        given["client.region"] = config.s3.region
    return given


def _more(config: SourceConfig) -> dict[str, str]:
    """The properties that the configuration gives to both, secrets included."""
    given = config.lake.catalog.properties
    return {key: value.get_secret_value() for key, value in given.items()}


def pyiceberg_properties(config: SourceConfig) -> dict[str, str]:
    """The same catalog for pyiceberg, password included: not for display."""
    kind = config.lake.catalog.type
    properties = {"type": kind, "warehouse": config.warehouse}
    if kind == "sql":
        address = sql_catalog_uri(config).update_query_dict({"options": _options(config)})
        properties["uri"] = address.render_as_string(hide_password=False)
        properties["pool_pre_ping"] = "true"  # idle connections end: by time-outs, by restarts
    elif config.lake.catalog.uri is not None:
        properties["uri"] = config.lake.catalog.uri.get_secret_value()
    properties |= file_io(config)
    if config.warehouse.startswith("s3://"):
        properties["s3.connect-timeout"] = str(S3_CONNECT_SECONDS)
        properties["s3.request-timeout"] = str(S3_REQUEST_SECONDS)
    if config.s3.endpoint:
        properties["s3.endpoint"] = config.s3.endpoint
        properties["s3.force-virtual-addressing"] = str(not config.s3.path_style).lower()
    if config.s3.region:
        properties["s3.region"] = config.s3.region
    # boto3, which speaks to Glue, doesn't know the variable that Java and pyarrow take it from.
    if region := config.s3.region or os.environ.get("AWS_REGION"):
        properties["client.region"] = region
    if _may_be_in_s3(config):
        properties |= config.s3.key or {
            key: os.environ[variable] for key, variable in _KEY.items() if os.environ.get(variable)
        }
    return properties | _more(config)


def _bare(address: str) -> str:
    """A catalog's address without parts that may be secret: user, password and parameters."""
    parts = urlsplit(address)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()


def shown(config: SourceConfig) -> dict[str, Any]:
    """The catalog's address and settings without secrets, for ``status --json``."""
    kind = config.lake.catalog.type
    uri = config.lake.catalog.uri
    address = _bare(uri.get_secret_value()) if uri is not None else None
    if kind == "sql":
        shown_uri = sql_catalog_uri(config).set(password=None)
        address = shown_uri.difference_update_query(SECRET).render_as_string()
    return {
        "name": CATALOG,
        "type": kind,
        "uri": address,
        "warehouse": config.warehouse,
        "namespace": config.namespace,
        "schema": catalog_schema(config),
    }


def open_catalog(config: SourceConfig) -> Catalog:
    """The catalog through pyiceberg; one per process and configuration.

    A SQL catalog's tables are made if they aren't there. Raises EnvironmentProblem or TlsProblem if
    its database can't be reached at first.
    """
    with reached():
        ours = config.state.schema_ if catalog_schema(config) == config.state.schema_ else ""
        return _open(
            coordination_dsn(config) if ours else "",
            ours,
            tuple(sorted(pyiceberg_properties(config).items())),
        )


def every_namespace(config: SourceConfig, catalog: Catalog) -> list[str]:
    """Those of the configuration, then the others that the catalog shows us."""
    there = set[str]()
    with suppress(Exception):  # each catalog says in its own way that others' aren't ours to see
        there = {namespace[0] for namespace in catalog.list_namespaces() if len(namespace) == 1}
    return [*sorted(config.namespaces), *sorted(there - config.namespaces)]


@contextmanager
def tried(config: SourceConfig) -> Iterator[Catalog]:
    """The catalog of :func:`open_catalog`, for a trial: a SQL catalog rolls all of it back.

    Files that the trial stores stay. Raises like :func:`open_catalog`.
    """
    if config.lake.catalog.type != "sql":
        yield open_catalog(config)
        return
    with reached():
        refuse_foreign_schema(config)
        properties = pyiceberg_properties(config) | {"init_catalog_tables": "false"}
        catalog, schema = SqlCatalog(CATALOG, **properties), catalog_schema(config)
        engine = catalog.engine
        with engine.connect() as connection, connection.begin() as transaction:
            # The catalog's sessions share this connection's transaction, which they don't commit.
            catalog.engine = connection  # type: ignore[assignment]
            if schema is not None and not connection.dialect.has_schema(connection, schema):
                connection.execute(text(f"create schema {sql_name(schema)}"))
            catalog.create_tables()
            yield catalog
            transaction.rollback()
        engine.dispose()


@contextmanager
def reached() -> Iterator[None]:
    """Around a use of a SQL catalog: raises EnvironmentProblem or TlsProblem if it is away."""
    try:
        yield
    except TlsProblem:
        raise
    except (OperationalError, psycopg.OperationalError) as error:
        said = error.orig if isinstance(error, OperationalError) else error
        if (problem := tls_problem(str(said))) is not None:
            raise problem from error
        raise EnvironmentProblem(
            f"the SQL catalog can't be reached: {first_line(said or error)}",
            "Start its database, mend the network, or correct lake.catalog.uri.",
        ) from error


@lru_cache(maxsize=16)
# "create table if not exists" isn't atomic in Postgres: of two at once, one fails.
@retry(retry=retry_if_exception_type(IntegrityError), stop=stop_after_attempt(5), reraise=True)
def _open(dsn: str, schema: str, properties: tuple[tuple[str, str], ...]) -> Catalog:
    if schema:
        make_schema(dsn, schema)
    named = dict(properties)
    if named["type"] == "rest":
        from cdc_assets.lake.catalog.rest_client import rest_catalog

        return rest_catalog(CATALOG, named)
    if named["type"] == "sql":
        del named["type"]
        named["py-catalog-impl"] = f"{ParsedOnce.__module__}.{ParsedOnce.__name__}"
    return load_catalog(CATALOG, **named)
