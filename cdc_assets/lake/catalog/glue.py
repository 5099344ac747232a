"""Where a Glue catalog leads a table, and how it is led elsewhere (``lake.catalog.commits``)."""

from __future__ import annotations

from typing import Any

from botocore.exceptions import ClientError
from pyiceberg.catalog import METADATA_LOCATION, PREVIOUS_METADATA_LOCATION, Catalog
from pyiceberg.catalog.glue import (
    GLUE_SKIP_ARCHIVE,
    GLUE_SKIP_ARCHIVE_DEFAULT,
    GlueCatalog,
)
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.typedef import Identifier
from pyiceberg.utils.properties import property_as_bool

from cdc_assets.lake.catalog.commits import OnlySpark

# What an update takes of a table as Glue tells it.
_TAKEN = frozenset(
    {
        *("Name", "Description", "Owner", "LastAccessTime", "LastAnalyzedTime", "Retention"),
        *("StorageDescriptor", "PartitionKeys", "ViewOriginalText", "ViewExpandedText"),
        *("TableType", "Parameters", "TargetTable"),
    }
)
_GONE, _BEATEN = "EntityNotFoundException", "ConcurrentModificationException"
_REFUSED = "AccessDeniedException"


def glue_entries(catalog: Catalog) -> GlueEntries | None:
    """The entries of a Glue catalog's tables."""
    return GlueEntries(catalog) if isinstance(catalog, GlueCatalog) else None


class GlueEntries:
    """The entries of a Glue catalog's tables. Raises ClientError for what Glue says otherwise."""

    def __init__(self, catalog: GlueCatalog) -> None:
        self._catalog = catalog

    def led_to(self, table: Identifier) -> str:
        """The place of a table's metadata. Raises NoSuchTableError."""
        return str(self._entry(table)["Parameters"][METADATA_LOCATION])

    def lead(self, table: Identifier, former: str, new: str) -> bool:
        """Lead from ``former`` metadata to ``new``; False, and nothing is done, from any other.

        Raises OnlySpark, and nothing is done, where this process may not.
        """
        entry = self._entry(table)
        if entry["Parameters"][METADATA_LOCATION] != former:
            return False
        said = {METADATA_LOCATION: new, PREVIOUS_METADATA_LOCATION: former}
        taken: Any = {key: value for key, value in entry.items() if key in _TAKEN}
        try:
            self._catalog.glue.update_table(
                DatabaseName=table[0],
                TableInput={**taken, "Parameters": {**entry["Parameters"], **said}},
                SkipArchive=property_as_bool(
                    self._catalog.properties, GLUE_SKIP_ARCHIVE, GLUE_SKIP_ARCHIVE_DEFAULT
                ),
                VersionId=entry["VersionId"],
            )
        except ClientError as error:
            if _code(error) == _BEATEN:
                return False
            if _code(error) == _REFUSED:
                raise OnlySpark(str(error)) from error
            raise
        return True

    def _entry(self, table: Identifier) -> dict[str, Any]:
        try:
            found: Any = self._catalog.glue.get_table(DatabaseName=table[0], Name=table[1])
        except ClientError as error:
            if _code(error) == _GONE:
                raise NoSuchTableError(f"Table does not exist: {'.'.join(table)}") from error
            raise
        entry: dict[str, Any] = found["Table"]
        return entry


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code"))
