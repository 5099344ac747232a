"""A SQL catalog through pyiceberg that parses a table's metadata once, not at each look.

And that leads a table to other metadata (``lake.catalog.commits``).

An hour of merges is 1,500 snapshots: more than a megabyte, and 25 ms of Python for each look, of
which a merge needs several. A metadata file never changes, and its name is never used again.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

from pyiceberg.catalog import Catalog
from pyiceberg.catalog.sql import IcebergTables, SqlCatalog
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.io import load_file_io
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.typedef import Identifier
from sqlalchemy import ColumnElement, select, update
from sqlalchemy.orm import Session

# Of all tables together, in parsed snapshots, each of which takes some 7 kB.
_LIMIT = 10_000
# A column of a schema takes a quarter of a snapshot; each change of a column or a comment adds a
# schema.
_COLUMNS = 4


class ParsedOnce(SqlCatalog):
    """Keeps metadata of as many tables as there is room for.

    Tables are looked at in turns, so the one that wasn't looked at for longest is the next one: any
    other would be better to lose. The one that goes is taken at random.
    """

    def __init__(self, name: str, **properties: str) -> None:
        super().__init__(name, **properties)
        self._parsed: dict[str, TableMetadata] = {}
        self._lock = threading.Lock()

    def _convert_orm_to_iceberg(self, orm_table: IcebergTables) -> Table:
        location = orm_table.metadata_location
        known = self._parsed.get(location) if location else None
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

    def led_to(self, table: Identifier) -> str:
        """The place of a table's metadata. Raises NoSuchTableError."""
        with Session(self.engine) as session:
            found = session.scalar(
                select(IcebergTables.metadata_location).where(*self._entry(table))
            )
        if found is None:
            raise NoSuchTableError(f"Table does not exist: {'.'.join(table)}")
        return str(found)

    def lead(self, table: Identifier, former: str, new: str) -> bool:
        """Lead from ``former`` metadata to ``new``; False, and nothing is done, from any other."""
        with Session(self.engine) as session:
            done = session.scalar(
                update(IcebergTables)
                .where(*self._entry(table), IcebergTables.metadata_location == former)
                .values(metadata_location=new, previous_metadata_location=former)
                .returning(IcebergTables.table_name)
                .execution_options(synchronize_session=False)
            )
            session.commit()
        return done is not None

    def _entry(self, table: Identifier) -> Iterator[ColumnElement[bool]]:
        """What the catalog's entry of a table meets."""
        yield IcebergTables.catalog_name == self.name
        yield IcebergTables.table_namespace == Catalog.namespace_to_string(table[:-1])
        yield IcebergTables.table_name == table[-1]
        if (of_its_type := self._iceberg_type_filter()) is not None:
            yield of_its_type

    def _keep(self, location: str, metadata: TableMetadata) -> None:
        with self._lock:
            for old, known in list(self._parsed.items()):  # a table's earlier file
                if known.table_uuid == metadata.table_uuid:
                    del self._parsed[old]
            others = list(self._parsed)
            self._parsed[location] = metadata
            while others and sum(map(_weight, self._parsed.values())) > _LIMIT:
                gone = random.randrange(len(others))  # noqa: S311 - no secret
                del self._parsed[others.pop(gone)]


def _weight(metadata: TableMetadata) -> int:
    """In parsed snapshots."""
    columns = sum(len(schema.fields) for schema in metadata.schemas)
    return 1 + len(metadata.snapshots) + columns // _COLUMNS
