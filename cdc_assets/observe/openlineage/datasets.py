"""The tables of Postgres and of the lake, as OpenLineage names and describes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from cdc_assets.config.addresses import source_dsn
from cdc_assets.lake.tables import LakeColumn, LakeTable
from cdc_assets.postgres.session.parameters import resolved

if TYPE_CHECKING:
    from openlineage.client.event_v2 import InputDataset, OutputDataset
    from openlineage.client.facet_v2 import DatasetFacet, OutputDatasetFacet


def source_dataset(lake: LakeTable) -> InputDataset:
    """The table in Postgres."""
    from openlineage.client.event_v2 import InputDataset
    from openlineage.client.facet_v2 import schema_dataset as schema
    from openlineage.client.naming.dataset import Postgres

    given, table = resolved(source_dsn(lake.config)), lake.row.table
    database = given.get("dbname") or given.get("user") or "postgres"
    naming = Postgres(*server_of(given), database, table.schema, table.name)
    fields = [schema.SchemaDatasetFacetFields(c.source.name, c.source.type) for c in lake.columns]
    facets: dict[str, DatasetFacet] = {"schema": schema.SchemaDatasetFacet(fields)}
    return InputDataset(naming.get_namespace(), naming.get_name(), facets=facets)


def lake_dataset(
    lake: LakeTable, place: str, source: InputDataset, rows: int | None
) -> OutputDataset:
    """The lake table, named by its place, as Spark's integration names it, and in its catalog."""
    from openlineage.client.event_v2 import OutputDataset
    from openlineage.client.facet_v2 import column_lineage_dataset as lineage
    from openlineage.client.facet_v2 import output_statistics_output_dataset as statistics
    from openlineage.client.facet_v2 import schema_dataset as schema
    from openlineage.client.facet_v2 import symlinks_dataset as symlinks

    def origin(column: LakeColumn) -> lineage.Fields:
        masked = column.mask is not None
        how = "TRANSFORMATION" if masked else "IDENTITY"
        done = lineage.Transformation("DIRECT", how, masking=masked)
        theirs = lineage.InputField(source.namespace, source.name, column.source.name, [done])
        return lineage.Fields([theirs])

    namespace, name = place_of(place)
    fields = [schema.SchemaDatasetFacetFields(c.name, c.mapping.lake) for c in lake.columns]
    in_catalog = symlinks.Identifier(namespace, ".".join(lake.identifier), "TABLE")
    facets: dict[str, DatasetFacet] = {
        "schema": schema.SchemaDatasetFacet(fields),
        "columnLineage": lineage.ColumnLineageDatasetFacet(
            {column.name: origin(column) for column in lake.columns}
        ),
        "symlinks": symlinks.SymlinksDatasetFacet([in_catalog]),
    }
    written: dict[str, OutputDatasetFacet] = {}
    if rows is not None:
        written["outputStatistics"] = statistics.OutputStatisticsOutputDatasetFacet(rows)
    return OutputDataset(namespace, name, facets=facets, outputFacets=written)


def location_of(lake: LakeTable) -> str:
    """The table's folder; before it exists, where its catalog will put it as a rule."""
    if lake.location is not None:
        return lake.location
    loaded = lake.load()
    given = f"{lake.config.warehouse}/{'/'.join(lake.identifier)}"
    return loaded.location() if loaded is not None else given


def server_of(given: Mapping[str, str]) -> tuple[str, str]:
    """Host and port of libpq's parameters, as tools that have no ``hostaddr`` and no socket do."""
    host = (given.get("host") or given.get("hostaddr") or "").split(",")[0]
    if not host or host.startswith(("/", "@")):
        host = "localhost"
    port = given.get("port", "").split(",")[0] or "5432"
    return f"[{host}]" if ":" in host else host, port


def place_of(uri: str) -> tuple[str, str]:
    """Namespace and name of a dataset at ``uri``, by OpenLineage's rules."""
    parts = urlsplit(uri)
    if parts.scheme in ("", "file"):
        return "file", parts.path
    scheme = "s3" if parts.scheme in ("s3a", "s3n") else parts.scheme
    return f"{scheme}://{parts.netloc}", parts.path.strip("/")
