"""Whether all that a source needs is ready: the source itself, and everything around it.

``check`` prints it, and the check ``ready`` of the source assets shows it. Each check is made by
itself, so that all faults are reported together; an unreachable service is a finding, too. Probes
write, read and remove again: afterwards everything is as it was before.

A materializer checks its own preconditions when it begins (:func:`admitted`), the flusher in
``flushing``.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import psycopg
import pyarrow as pa
from psycopg import sql
from pyarrow import fs
from pyiceberg.exceptions import NamespaceAlreadyExistsError
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.update import UpgradeFormatVersionUpdate
from pyiceberg.types import IntegerType, NestedField
from pyspark.sql import SparkSession

from cdc_assets.config.addresses import all_at_the_source, coordination_dsn, source_dsn
from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import CdcError, EnvironmentProblem, first_line
from cdc_assets.lake.catalog.catalog import CATALOG, open_catalog, tried
from cdc_assets.lake.catalog.place import TABLES, catalog_schema, passed_over
from cdc_assets.lake.copies import COPIED_VERSION
from cdc_assets.lake.drafts.branches import PREFIX
from cdc_assets.lake.spark.jars import PACKAGES
from cdc_assets.lake.spark.session import open_session, server, spark_problem
from cdc_assets.log.staged.storage import Storage, folders_as_they_were
from cdc_assets.messages.findings import Finding
from cdc_assets.postgres.session.clock import ahead_seconds
from cdc_assets.postgres.session.connect import connect
from cdc_assets.postgres.session.parameters import resolved
from cdc_assets.process.machine import check_java
from cdc_assets.readiness.copy_server import copy_findings
from cdc_assets.readiness.executors.clocks import clock_findings
from cdc_assets.readiness.executors.findings import python_findings, reach_findings
from cdc_assets.readiness.flushing import coordination_findings, refuse, source_findings, staging
from cdc_assets.readiness.lake_tables import lake_table_findings
from cdc_assets.readiness.links import jdbc_findings, transport_findings

# Lags are measured by the coordination server's clock, and commit times are the source's.
SKEW_SECONDS = 5.0
_SPARK = "4.1"
_ICEBERG = next(p.rsplit(":", 1)[1] for p in PACKAGES if "iceberg-spark-runtime" in p)


def review(config: SourceConfig) -> list[Finding]:
    """All findings, the source's first."""
    found = source_findings(config)
    if any(finding.code == "source_unreachable" for finding in found) and all_at_the_source(config):
        # What is told of the rest would be the same, with remedies for what nobody has set.
        return [*found, *transport_findings(config), *staging(config, leave_nothing=True)]
    return [
        *found,
        *coordination_findings(config),
        *transport_findings(config),
        *copy_findings(config),
        *_clocks(config),
        *staging(config, leave_nothing=True),
        *_catalog(config),
        *_lake_tables(config),
        *_spark(config),
    ]


def admitted(config: SourceConfig, opened: Callable[[], SparkSession]) -> SparkSession:
    """The session that ``opened`` gives, if all preconditions of merging hold.

    Raises NotReady naming every error. There are no probes that write: the merge itself writes, and
    runs may begin every few minutes. Versions are only checked if the server isn't ours.
    """
    refuse(jdbc_findings(config))  # with such an error no session would open
    found = [*coordination_findings(config), *_readable(config), *_catalog_answers(config)]
    session, problem = None, spark_problem(config) if config.spark.remote else None
    try:
        session = opened() if problem is None else None
    except Exception as error:  # noqa: BLE001 - gRPC's, Spark's and the network's
        problem = first_line(error)
    if session is None:
        found.append(_unreachable(problem))
    elif config.spark.remote:
        found += _versions(session)
    refuse(found)
    assert session is not None  # or it was refused
    return session


def _readable(config: SourceConfig) -> Iterator[Finding]:
    """Whether staged files can be found."""
    filesystem, path = Storage.of(config.s3).locate(f"{config.staging_uri}/{config.log_name}")
    try:
        filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
    except OSError as error:
        yield Finding(
            "staging_unreadable",
            "error",
            f"the staging place {config.staging_uri} can't be read: {first_line(error)}",
            "Correct staging.uri (and s3:), or the rights of this process there.",
        )


def _catalog_answers(config: SourceConfig) -> Iterator[Finding]:
    try:
        open_catalog(config).namespace_exists(config.namespace)
    except Exception as error:  # noqa: BLE001 - each catalog has errors of its own
        yield Finding(
            "catalog_unreachable",
            "error",
            f"the catalog can't be asked for {config.namespace}:"
            f" {type(error).__name__}: {first_line(error)}",
            "Start it, mend the network, or correct lake.catalog.",
        )


def _unreachable(problem: str | None) -> Finding:
    return Finding(
        "spark_unreachable",
        "error",
        f"Spark Connect can't be used: {problem}",
        "Start it, or correct spark.remote.",
    )


def _clocks(config: SourceConfig) -> Iterator[Finding]:
    """How far the source's clock is from the coordination server's."""
    try:
        offsets = [_offset(source_dsn(config)), _offset(coordination_dsn(config))]
    except (psycopg.OperationalError, CdcError):
        return  # reported by other checks
    apart = abs(offsets[0] - offsets[1])
    if apart > SKEW_SECONDS:
        yield Finding(
            "clock_skew",
            "warning",
            f"the clocks of the source and the coordination database are {apart:.0f} s apart:"
            " every lag is wrong by that.",
            "Have both hosts synchronize their clocks (chrony, NTP).",
        )


def _offset(dsn: str) -> float:
    with connect(dsn, application_name="cdc_assets check") as connection:
        return ahead_seconds(connection)


def _catalog(config: SourceConfig) -> Iterator[Finding]:
    """Make a table and remove it: the catalog and the warehouse have to take it."""
    name = f"cdc_probe_{uuid.uuid4().hex}"
    try:
        with tried(config) as catalog:
            made = True
            try:
                catalog.create_namespace(config.namespace)
            except NamespaceAlreadyExistsError:
                made = False
            try:
                schema = Schema(NestedField(1, "probe", IntegerType(), required=False))
                location = f"{config.warehouse}/{config.namespace}/{name}"
                local = location.startswith("file:")
                path = Path(Storage().locate(location)[1]) if local else Path()
                # Other catalogs choose it, as they do for a table.
                chosen = location if config.lake.catalog.type == "sql" else None
                with folders_as_they_were(path) if local else nullcontext():
                    table = catalog.create_table(
                        (config.namespace, name),
                        schema,
                        chosen,
                        properties={"format-version": COPIED_VERSION},
                    )
                    try:
                        asked = config.streams and config.lake.catalog.type == "rest"
                        found = [*_changes(config, table)] if asked else []
                    finally:
                        catalog.purge_table((config.namespace, name))
            finally:
                if made:
                    catalog.drop_namespace(config.namespace)
        yield from found
        yield from _catalog_place(config)
    except Exception as error:  # noqa: BLE001 - each catalog and each store has errors of its own
        yield Finding(
            "catalog_unwritable",
            "error",
            f"no table can be made in {config.namespace} at {config.warehouse}:"
            f" {type(error).__name__}: {first_line(error)}",
            "Correct lake.catalog, its rights, or those of the warehouse's folder or bucket"
            + (
                "; its key is in s3:, or in AWS_… variables."
                if "s3://" in config.warehouse
                else "."
            ),
        )


def _changes(config: SourceConfig, table: Table) -> Iterator[Finding]:
    """Whether a REST catalog, which applies changes by itself, can make those of merges.

    Branches are needed where no draft can be, which is found out at the first merge, or later.
    """
    table.append(pa.table({"probe": pa.array([], pa.int32())}))
    snapshot = table.metadata.current_snapshot_id
    assert snapshot is not None
    said = "it took one, and then there was none"
    try:
        table.manage_snapshots().create_branch(snapshot, PREFIX).commit()
        kept = PREFIX in table.refresh().metadata.refs
    except Exception as error:  # noqa: BLE001 - each catalog has errors of its own
        kept, said = False, f"{type(error).__name__}: {first_line(error)}"
    if not kept:
        yield Finding(
            "catalog_branches",
            "error",
            "the catalog keeps no branches of a table, and a merge that no draft can be made of"
            f" is written to one: {said}.",
            "Have another catalog in lake.catalog. A copy without changes needs no branches:"
            " snapshot.mode: snapshot_only.",
        )
    version = config.lake.format_version
    if version == table.format_version:
        return
    try:
        asked = {"action": "upgrade-format-version", "format-version": version}
        upgrade = UpgradeFormatVersionUpdate.model_validate(asked)
        table.catalog.commit_table(table, (), (upgrade,))
    except Exception as error:  # noqa: BLE001 - each catalog has errors of its own
        yield Finding(
            "catalog_version",
            "error",
            f"the catalog can't upgrade a table to format version {version}, as the first merge"
            f" does: {type(error).__name__}: {first_line(error)}",
            "Set lake.format_version: 2, or have a newer catalog.",
        )


def _lake_tables(config: SourceConfig) -> list[Finding]:
    try:
        return list(lake_table_findings(config))
    except Exception:  # noqa: BLE001 - of the catalog's or the log's, which was told by then
        return []


def _catalog_place(config: SourceConfig) -> Iterator[Finding]:
    """Whether the SQL catalog is where an earlier version made it."""
    found, ours = catalog_schema(config), config.state.schema_
    for schema, owner in passed_over(config):
        tables = (sql.Identifier(schema, table).as_string(None) for table in TABLES)
        role = sql.Identifier(resolved(coordination_dsn(config)).get("user", "…")).as_string(None)
        gives = " ".join(f"alter table {table} owner to {role};" for table in tables)
        yield Finding(
            "catalog_passed_over",
            "warning",
            f"in the schema {schema} is a SQL catalog of the role {owner}, which isn't trusted: it"
            " isn't used, and the lake tables that it has aren't found.",
            f"If an earlier role of this source made it: {gives} If not, this is said until the"
            " first lake table is made.",
        )
    if found not in (None, ours):
        tables = (sql.Identifier(str(found), table).as_string(None) for table in TABLES)
        moves = " ".join(f"alter table {table} set schema {ours};" for table in tables)
        yield Finding(
            "catalog_place",
            "warning",
            f"the SQL catalog is in the schema {found}, where an earlier version made it; it is"
            " used there.",
            f"It may stay. To move it, end everything that uses it, then: {moves}",
        )


def _spark(config: SourceConfig) -> Iterator[Finding]:
    """Java where we start Spark; versions and Python where a server is up."""
    url = config.spark.remote
    if url is None:
        try:
            check_java()
        except EnvironmentProblem as error:
            yield Finding("java", "error", error.what, error.remedy)
            return
        url = server(config).url()
        if url is None:
            return  # it will be started in the right version when needed
    problem = spark_problem(config)  # the client would try for minutes
    try:
        session = open_session(config, url) if problem is None else None
    except Exception as error:  # noqa: BLE001 - gRPC's, Spark's and the network's
        session, problem = None, first_line(error)
    if session is None:
        yield _unreachable(problem)
        return
    try:
        found = list(_versions(session))
        yield from found
        if all(finding.code != "spark_python" for finding in found):
            yield from clock_findings(session)
            if config.spark.remote:
                yield from reach_findings(session, config)
    finally:
        session.stop()


def _versions(session: SparkSession) -> Iterator[Finding]:
    if not session.version.startswith(f"{_SPARK}."):
        yield Finding(
            "spark_version",
            "error",
            f"the server is Spark {session.version}; {_SPARK} is needed.",
            "Use the image of infra/docker, or a cluster of that version.",
        )
    runtime = _asked(lambda: session.sql(f"select {CATALOG}.system.iceberg_version()").first())
    if isinstance(runtime, Exception) or runtime != _ICEBERG:
        said = first_line(runtime) if isinstance(runtime, Exception) else f"it is {runtime}"
        yield Finding(
            "iceberg_runtime",
            "error",
            f"the server doesn't have Iceberg's Spark runtime {_ICEBERG}: {said}",
            f"Start it with spark.jars.packages={','.join(PACKAGES)}.",
        )
    yield from python_findings(session)


def _asked(question: Callable[[], object]) -> object:
    """The first column of the answer, or the error."""
    try:
        row = question()
    except Exception as error:  # noqa: BLE001 - Spark's, the JVM's or Python's in a task
        return error
    return row[0] if row else None  # type: ignore[index]
