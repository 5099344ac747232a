"""A SQL catalog through pyiceberg that parses a table's metadata once, not at each look.

An hour of merges is 1,500 snapshots: more than a megabyte, and 25 ms of Python for each look, of
which a merge needs several. A metadata file never changes, and its name is never used again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from pyiceberg.catalog import Catalog
from pyiceberg.catalog.sql import IcebergTables, SqlCatalog
from pyiceberg.io import load_file_io
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata

# Of all tables together; a parsed snapshot takes some 3 kB.
_SNAPSHOTS = 30_000


class ParsedOnce(SqlCatalog):
    """Keeps the metadata of the tables that were looked at last."""

    def __init__(self, name: str, **properties: str) -> None:
        super().__init__(name, **properties)
        self._parsed: OrderedDict[str, TableMetadata] = OrderedDict()
        self._lock = threading.Lock()

    def _convert_orm_to_iceberg(self, orm_table: IcebergTables) -> Table:
        location = orm_table.metadata_location
        known = self._known(location) if location else None
        if location is None or known is None:
            table = super()._convert_orm_to_iceberg(orm_table)
            self._keep(table.metadata_location, table.metadata)
            return table
        if not load_file_io(self.properties, location).new_input(location).exists():
            raise FileNotFoundError(location)
        return Table(
            identifier=(
                *Catalog.identifier_to_tuple(orm_table.table_namespace),
                orm_table.table_name,
            ),
            metadata=known,
            metadata_location=location,
            io=self._load_file_io(known.properties, location),
            catalog=self,
        )

    def _known(self, location: str) -> TableMetadata | None:
        with self._lock:
            if location in self._parsed:
                self._parsed.move_to_end(location)
            return self._parsed.get(location)

    def _keep(self, location: str, metadata: TableMetadata) -> None:
        with self._lock:
            for old, known in list(self._parsed.items()):  # a table's earlier file
                if known.table_uuid == metadata.table_uuid:
                    del self._parsed[old]
            self._parsed[location] = metadata
            while len(self._parsed) > 1 and _snapshots(self._parsed) > _SNAPSHOTS:
                self._parsed.popitem(last=False)


def _snapshots(parsed: OrderedDict[str, TableMetadata]) -> int:
    return sum(1 + len(metadata.snapshots) for metadata in parsed.values())
