"""What has to be so before a state is moved: at the new place, and of the lake's catalog."""

from __future__ import annotations

from psycopg import sql

from cdc_assets.config.addresses import coordination_dsn
from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import ConfigurationError, PreflightError
from cdc_assets.lake.catalog.catalog import CATALOG
from cdc_assets.lake.catalog.place import TABLES, catalog_schema
from cdc_assets.postgres.session.connect import connect
from cdc_assets.readiness.flushing import coordination_findings


def refuse_without_catalog(config: SourceConfig) -> None:
    """The default catalog is where the state is: elsewhere its tables would be looked for in vain.

    It isn't moved along: readers of the lake have its address, and each of two would have writers.
    """
    if (schema := catalog_schema(config)) is None:
        return
    with connect(coordination_dsn(config), application_name="cdc_assets catalog") as connection:
        info = connection.info
        there = connection.execute(
            "select pg_catalog.to_regclass(%s)",
            (sql.Identifier(schema, TABLES[0]).as_string(connection),),
        ).fetchone()
        if there is None or there[0] is None:
            return
        ours = connection.execute(
            sql.SQL(
                "select from {} where catalog_name = %s and table_namespace = any(%s) limit 1"
            ).format(sql.Identifier(schema, TABLES[0])),
            (CATALOG, sorted(config.namespaces)),
        )
        if not ours.rowcount:
            return
        uri = (
            f"postgresql://{info.user}:${{CATALOG_PASSWORD}}@{info.host}:{info.port}/{info.dbname}"
            f"?options=-csearch_path%3D{schema}"
        )
    raise ConfigurationError(
        "the SQL catalog of the lake is in the coordination database, where it is looked for by"
        " default; it stays there, and has to be named before the state is moved.",
        f"Set lake.catalog.uri to its address, with the password or however that role logs in:"
        f" {uri}; start all with it, and try again.",
    )


def refuse_target(target: SourceConfig) -> None:
    """Raise PreflightError unless the schema may be made or used there, by ``check``'s findings."""
    found = [
        finding
        for finding in coordination_findings(target)
        if finding.severity == "error" and finding.code != "state_moved"
    ]
    if found:
        raise PreflightError(
            " ".join(finding.message for finding in found),
            " ".join(finding.remedy for finding in found),
        )
