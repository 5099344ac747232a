"""A lake table's contents: its live data files with their deletes, its manifests, its bytes.

pyiceberg reads them from the metadata, so a look that finds no work needs no Spark. pyiceberg 0.12
reads every manifest as format version 2, where a deletion vector doesn't name its data file; so
manifests are read here with the schema of version 3, of which the others are a part.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pyarrow import fs
from pyiceberg.avro.file import AvroFile
from pyiceberg.manifest import DATA_FILE_TYPE, MANIFEST_ENTRY_SCHEMAS, ManifestFile
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.typedef import Record
from pyiceberg.types import StructType

from cdc_assets.log.staged.storage import Storage

_READ_VERSION = 3
_DELETED = 2  # an entry's status: the file left the table with this manifest
_DATA, _POSITION_DELETES = 0, 1


def _places(struct: StructType, *field_ids: int) -> tuple[int, ...]:
    at = {field.field_id: place for place, field in enumerate(struct.fields)}
    return tuple(at[field_id] for field_id in field_ids)


# Field ids are those of the Iceberg specification: content, file_path, partition, record_count,
# file_size_in_bytes, referenced_data_file.
_STATUS, _DATA_FILE = _places(MANIFEST_ENTRY_SCHEMAS[_READ_VERSION].as_struct(), 0, 2)
_FIELDS = _places(DATA_FILE_TYPE[_READ_VERSION], 134, 100, 102, 103, 104, 143)


@dataclass(frozen=True, slots=True)
class LiveFile:
    """A data file of a snapshot. ``deleted`` of its ``rows`` are hidden by its deletion vector.

    Files of one ``partition`` (spec and values) may be written together.
    """

    path: str
    partition: str
    bytes: int
    rows: int
    deleted: int
    spec_id: int = 0


@dataclass(frozen=True, slots=True)
class Stored:
    """What lies below a table's location, referenced or not."""

    files: int
    bytes: int
    metadata_bytes: int


def live_files(table: Table, snapshot: Snapshot) -> list[LiveFile]:
    """The data files of ``snapshot``, each with what its deletion vector hides."""
    data: list[tuple[str, str, int, int, int]] = []
    hidden: dict[str, int] = {}
    for manifest in snapshot.manifests(table.io):
        for content, path, partition, rows, size, target in _entries(table, manifest):
            if content == _DATA:
                spec_id = manifest.partition_spec_id
                data.append((path, f"{spec_id}:{partition!r}", size, rows, spec_id))
            elif content == _POSITION_DELETES and target is not None:
                hidden[target] = hidden.get(target, 0) + rows
    return [
        LiveFile(path, partition, size, rows, hidden.get(path, 0), spec_id)
        for path, partition, size, rows, spec_id in data
    ]


def _entries(
    table: Table, manifest: ManifestFile
) -> Iterable[tuple[int, str, Record, int, int, str | None]]:
    """``(content, path, partition, rows, bytes, referenced file)`` of what isn't deleted."""
    opened = AvroFile[Record](
        table.io.new_input(manifest.manifest_path), MANIFEST_ENTRY_SCHEMAS[_READ_VERSION]
    )
    with opened as entries:
        for entry in entries:
            if entry[_STATUS] != _DELETED:
                content, path, partition, rows, size, target = (
                    entry[_DATA_FILE][i] for i in _FIELDS
                )
                yield content or _DATA, path, partition, rows, size, target


def stored(storage: Storage, location: str) -> Stored:
    """List the location. On an object store that is a request for each thousand files."""
    filesystem, path = storage.locate(location, literal=True)
    selector = fs.FileSelector(path, recursive=True, allow_not_found=True)
    found = [info for info in filesystem.get_file_info(selector) if info.is_file]
    metadata = sum(
        info.size for info in found if "/metadata/" in info.path[len(path.rstrip("/")) :]
    )
    return Stored(len(found), sum(info.size for info in found), metadata)
