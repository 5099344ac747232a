"""Whether a publication sends all of a table."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from psycopg import sql

from cdc_assets.errors import TableProblem
from cdc_assets.postgres.catalog import SourceTable
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.publication.contents import COLUMN_LISTS, operations, publication_of
from cdc_assets.postgres.session.connect import Connection


def refuse_partial_publication(
    connection: Connection,
    publication: str,
    table: SourceTable,
    excluded: Collection[str],
    *,
    inserts_only: bool = False,
    filtered: bool | None = False,
) -> None:
    """Raise TableProblem if a publication made by hand leaves out something of ``table``.

    Looks at the one of the two that the table belongs in. A column list may leave out the
    ``excluded`` columns. ``filtered``: whether it has a row filter; None: that is seen to later.
    """
    publication = publication_of(publication, inserts_only=inserts_only)
    row = connection.execute(
        "select pubinsert and pubtruncate and (pubupdate and pubdelete or %s), pubviaroot"
        " from pg_catalog.pg_publication where pubname = %s",
        (inserts_only, publication),
    ).fetchone()
    if row is None:
        return
    row_filter = lacks_columns = False
    if connection.info.server_version >= COLUMN_LISTS:
        row_filter, listed = connection.execute(
            "select prqual is not null, prattrs::int2[] from pg_catalog.pg_publication_rel r"
            " join pg_catalog.pg_publication p on p.oid = r.prpubid"
            " where p.pubname = %s and r.prrelid = %s",
            (publication, table.oid),
        ).fetchone() or (False, None)
        lacks_columns = listed is not None and any(
            not column.generated and column.number not in listed and column.name not in excluded
            for column in table.columns
        )
    shape = PublishedShape(bool(row[0]), bool(row[1]), bool(row_filter), lacks_columns)
    wanted = shape.row_filter if filtered is None else filtered
    missing = shape.missing(
        publication, table.id, table.kind, inserts_only=inserts_only, filtered=wanted
    )
    if missing is not None:
        raise TableProblem(table.id, missing.what, missing.remedy)


@dataclass(frozen=True, slots=True)
class Missing:
    """Something that a publication leaves out of a table: a stable code, what, and the remedy."""

    code: str
    what: str
    remedy: str


@dataclass(frozen=True, slots=True)
class PublishedShape:
    """How a publication sends a table's changes.

    ``lacks_columns``: its column list for the table lacks a wanted column.
    """

    every_operation: bool
    via_root: bool
    row_filter: bool
    lacks_columns: bool

    @property
    def letters(self) -> str:
        """The publication's own settings, as two letters."""
        return ("a" if self.every_operation else "-") + ("r" if self.via_root else "-")

    def missing(
        self,
        publication: str,
        table: TableId,
        kind: str,
        *,
        inserts_only: bool = False,
        filtered: bool = False,
    ) -> Missing | None:
        """The first thing that is amiss with the table (of that relkind), None if nothing.

        ``filtered``: whether it is to have a row filter.
        """
        name = sql.Identifier(publication).as_string(None)
        if not self.every_operation:
            return Missing(
                "publication_operations",
                f"the publication {publication} doesn't publish every kind of change",
                f"alter publication {name} set (publish = '{operations(inserts_only)}');",
            )
        if kind == "p" and not self.via_root:
            return Missing(
                "publication_via_partitions",
                f"the publication {publication} sends changes as those of the partitions",
                f"alter publication {name} set (publish_via_partition_root = true);",
            )
        whole = f"alter publication {name} drop table only {table}; -- it is added again as a whole"
        if filtered and not self.row_filter:
            return Missing(
                "publication_row_filter",
                f"the publication {publication} has no row filter for it: it sends rows that where"
                " leaves out",
                whole.replace("as a whole", "with it"),
            )
        if self.row_filter and not filtered:
            return Missing(
                "publication_row_filter",
                f"the publication {publication} has a row filter for it: what it leaves out would"
                " silently be missing",
                whole,
            )
        if self.lacks_columns:
            return Missing(
                "publication_column_list",
                f"the publication {publication} has a column list for it without a column that"
                " isn't in columns.exclude: its values would silently be missing",
                f"{whole}; or list that column, or exclude it",
            )
        return None
