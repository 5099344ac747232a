"""Whether a publication sends all of a table."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from psycopg import sql

from cdc_assets.errors import TableProblem
from cdc_assets.postgres.catalog import SourceTable
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.publication.contents import COLUMN_LISTS, operations, publication_of
from cdc_assets.postgres.session.connect import Connection


@dataclass(frozen=True, slots=True)
class Entry:
    """A publication's own entry for a table; ``columns``: the numbers of its list, if any."""

    row_filter: bool
    columns: AbstractSet[int] | None


@dataclass(frozen=True, slots=True)
class Published:
    """What a publication sends: of every table, and by the oid of those with entries."""

    inserts: bool
    changes: bool
    via_root: bool
    entries: Mapping[int, Entry]


def published_shapes(
    connection: Connection, publications: Sequence[str], oids: Sequence[int]
) -> dict[str, Published]:
    """Those of the publications that exist, with the entries of some tables: two queries."""
    entries: dict[str, dict[int, Entry]] = {name: {} for name in publications}
    if connection.info.server_version >= COLUMN_LISTS:
        rows = connection.execute(
            "select p.pubname::text, r.prrelid::bigint, r.prqual is not null, r.prattrs::int2[]"
            " from pg_catalog.pg_publication_rel r"
            " join pg_catalog.pg_publication p on p.oid = r.prpubid"
            " where p.pubname = any(%s) and r.prrelid = any(%s::oid[])",
            (list(publications), list(oids)),
        )
        for name, oid, row_filter, listed in rows:
            entries[name][oid] = Entry(row_filter, None if listed is None else frozenset(listed))
    made = connection.execute(
        "select pubname::text, pubinsert and pubtruncate, pubupdate and pubdelete, pubviaroot"
        " from pg_catalog.pg_publication where pubname = any(%s)",
        (list(publications),),
    )
    return {
        name: Published(inserts, changes, via_root, entries[name])
        for name, inserts, changes, via_root in made
    }


def refuse_partial_publication(
    publications: Mapping[str, Published],
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
    if (found := publications.get(publication)) is None:
        return
    entry = found.entries.get(table.oid, Entry(row_filter=False, columns=None))
    listed = entry.columns
    lacks_columns = listed is not None and any(
        not column.generated and column.number not in listed and column.name not in excluded
        for column in table.columns
    )
    every_operation = found.inserts and (found.changes or inserts_only)
    shape = PublishedShape(every_operation, found.via_root, entry.row_filter, lacks_columns)
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
