"""Links to other hosts on which a third party could read, or pretend to be the other side.

``check`` reports each as a warning: a network may be closed by other means, as containers' is on
one host, and such a set-up goes on. Only a demand of the SQL catalog's address that Spark's driver
can't meet is an error. No connection is made, and no address that may be a secret is in a message.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import urlsplit

from pyspark.errors import PySparkValueError
from pyspark.sql.connect.client.core import DefaultChannelBuilder

from cdc_assets.config.addresses import (
    coordination_dsn,
    copy_dsn,
    copy_replication_dsn,
    replication_dsn,
    source_dsn,
)
from cdc_assets.config.alerts import MailSink, SnsSink, WebhookSink, sink_keys
from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import CdcError, ConfigurationError
from cdc_assets.lake.catalog.catalog import catalog_dsn, refuse_for_jdbc
from cdc_assets.messages.findings import Finding
from cdc_assets.postgres.session.parameters import elsewhere, hosts, resolved, sslmode, verified


def transport_findings(config: SourceConfig) -> Iterator[Finding]:
    """Links of the configuration that aren't verified, or can't be as safe as demanded."""
    yield from jdbc_findings(config)
    yield from _postgres(config)
    yield from _spark(config)
    yield from _plain_http(config)
    yield from _sinks(config)


def jdbc_findings(config: SourceConfig) -> Iterator[Finding]:
    """Demands of the SQL catalog's address that JDBC lacks; none if an embedded source is down.

    Spark's sessions raise the same.
    """
    try:
        refuse_for_jdbc(config)
    except ConfigurationError as error:
        yield Finding("transport_jdbc", "error", error.what, error.remedy)
    except CdcError:
        return


def _postgres(config: SourceConfig) -> Iterator[Finding]:
    """One finding an address, however many of the three parts use it."""
    dsns: dict[str, str] = {}
    with suppress(CdcError):  # an embedded source that doesn't run is on loopback
        dsns["postgres.dsn"] = source_dsn(config)
        dsns["postgres.replication_dsn"] = replication_dsn(config)
        dsns["state.postgres_url"] = coordination_dsn(config)
        if config.snapshot.from_ is not None and config.snapshot.from_.dsn is not None:
            dsns["snapshot.from.dsn"] = copy_dsn(config)
            dsns["snapshot.from.replication_dsn"] = copy_replication_dsn(config)
        if config.lake.catalog.type == "sql":
            dsns["lake.catalog.uri"] = catalog_dsn(config)
    found: dict[str, list[str]] = {}
    for key, dsn in dsns.items():
        found.setdefault(dsn, []).append(key)
    for dsn, keys in found.items():
        params = resolved(dsn)
        if not verified(params):
            where = ", ".join(host for host in hosts(params) if elsewhere(host))
            yield _warning(
                "transport_postgres",
                f"Postgres at {where} ({' = '.join(keys)}) is connected to with"
                f" sslmode={sslmode(params)}: whoever is in between may read everything, or"
                " pretend to be it.",
                "Add sslmode=verify-full and sslrootcert (the authority's file, or system).",
            )


def _spark(config: SourceConfig) -> Iterator[Finding]:
    if config.spark.remote is None:
        return
    try:
        builder = DefaultChannelBuilder(config.spark.remote)
    except (PySparkValueError, ValueError):
        return  # no session opens by it, which is reported elsewhere
    host = builder.host
    if elsewhere(host) and not builder.secure:
        yield _warning(
            "transport_spark",
            f"Spark Connect at {host} is spoken to without TLS: values, and what opens the catalog"
            " and the source, go there in the clear.",
            "Put a proxy with TLS in front of it, and write sc://host:port/;use_ssl=true; or keep"
            " it in a network that nobody else is in.",
        )


def _plain_http(config: SourceConfig) -> Iterator[Finding]:
    catalog = config.lake.catalog.uri
    if config.lake.catalog.type == "rest" and catalog is not None:
        yield from _http("transport_catalog", "the REST catalog", catalog.get_secret_value())
    if any(place.startswith("s3://") for place in (config.staging_uri, config.warehouse)):
        variables = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
        named = (os.environ[name] for name in variables if os.environ.get(name))
        yield from _http("transport_s3", "S3", config.s3.endpoint or next(named, ""))


def _sinks(config: SourceConfig) -> Iterator[Finding]:
    for key, sink in zip(sink_keys(config.alerts), config.alerts.sinks, strict=True):
        code, what = "transport_alerts", f"the sink {key} of alerts"
        if isinstance(sink, WebhookSink):
            yield from _http(code, what, sink.address)
        elif isinstance(sink, SnsSink):
            yield from _http(code, what, sink.endpoint or "")
        elif isinstance(sink, MailSink) and sink.security == "none" and elsewhere(sink.host):
            yield _warning(
                code, f"{what} sends mail to {sink.host} without TLS.", "Set security: starttls."
            )


def _http(code: str, what: str, address: str) -> Iterator[Finding]:
    try:
        parts = urlsplit(address)
    except ValueError:
        return  # no client can use it
    if parts.scheme == "http" and elsewhere(parts.hostname or ""):
        yield _warning(
            code,
            f"{what} at {parts.hostname} is spoken to by plain http://: whoever is in between may"
            " read it, or change it.",
            "Write https://; or keep it in a network that nobody else is in.",
        )


def _warning(code: str, message: str, remedy: str) -> Finding:
    return Finding(code, "warning", message, remedy)
