"""What a table is called where it is read, by oid and numbers: a restored dump has its own."""

from __future__ import annotations

from collections.abc import Sequence

from cdc_assets.config.source import SourceConfig
from cdc_assets.lake.tables import LakeColumn
from cdc_assets.log.table_row import TableRow
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.catalog import describe
from cdc_assets.postgres.publication.contents import publication_of
from cdc_assets.readiness.copy_server import is_dump


def numbers_there(
    pipeline: Pipeline, row: TableRow, columns: Sequence[LakeColumn]
) -> tuple[int, tuple[int, ...]]:
    """The table's oid, and its columns' numbers.

    Raises TableProblem, or psycopg.Error of where the dump is.
    """
    if not is_dump(pipeline.config):
        return row.oid, tuple(column.source.number for column in columns)
    with pipeline.connect_copy("copy") as there:
        found = describe(there, row.table)
    numbers = {column.name: column.number for column in found.columns}
    return found.oid, tuple(numbers.get(column.source.name, 0) for column in columns)


def publication_there(config: SourceConfig, row: TableRow) -> str | None:
    """The publication that has the table's row filter there, too; None if there is none."""
    if not config.publishes or is_dump(config):
        return None
    return publication_of(config.publication, inserts_only=row.inserts_only)
