"""Commits of a table that are made here, not by a statement of Spark.

A commit is what Iceberg's own client makes of it. In a SQL catalog and in Glue: a metadata file
that follows the table's, then the catalog leads there, provided that it led to the former file
until then. The server of a REST catalog writes metadata itself, and is asked to (``rest``).

The metadata is edited as JSON: pyiceberg writes no version 3, and leaves out what it doesn't know.
The clock here isn't asked. Iceberg reads no table whose history goes back by a minute, and Spark's
clock may be another.
"""

from __future__ import annotations

import gzip
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from botocore.exceptions import BotoCoreError, ClientError
from pydantic_core import from_json, to_json
from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.io import FileIO, load_file_io
from pyiceberg.table import Table, TableProperties
from pyiceberg.typedef import Identifier
from sqlalchemy.exc import OperationalError

from cdc_assets.errors import CdcError, first_line
from cdc_assets.lake.catalog.parsed import ParsedOnce

logger = logging.getLogger(__name__)

# A table's metadata, as its file has it.
Metadata = dict[str, Any]
# Changes metadata; False if there is nothing to change. What it raises stops the commit.
Edit = Callable[[Metadata], bool]

_KEEP = TableProperties.METADATA_PREVIOUS_VERSIONS_MAX
_SUFFIX = ".metadata.json"
_GZIP = b"\x1f\x8b"
# Versions whose metadata is known to have its refs where we edit them.
_VERSIONS = (2, 3)
_TRIES, _PAUSE_SECONDS = 5, 0.3
# Files that are deleted at the same time.
_AT_ONCE = 8
# An answer that was lost: the catalog may have done it.
_LOST = (OperationalError, ClientError, BotoCoreError)


class OnlySpark(Exception):
    """This process may not lead a table elsewhere."""


class Unknown(CdcError):
    """Nobody knows whether a commit is made, or will be."""


class Entries(Protocol):
    """The entries of a catalog, each of which leads to a table's metadata."""

    def led_to(self, table: Identifier) -> str:
        """The place of a table's metadata. Raises NoSuchTableError."""


@runtime_checkable
class Pointer(Entries, Protocol):
    """Those that a client writes."""

    def lead(self, table: Identifier, former: str, new: str) -> bool:
        """Lead from ``former`` metadata to ``new``; False, and nothing is done, from any other.

        Raises OnlySpark, and nothing is done, where this process may not.
        """


class Server(Entries, Protocol):
    """Those that a server writes, the metadata too."""

    def commit(self, loaded: Table, former: Metadata, new: Metadata) -> bool:
        """Have the table changed from ``former`` metadata to ``new``; False if that was refused.

        Of the metadata only snapshots and refs may differ, and what follows from them. Raises
        Unknown.
        """


def _entries(catalog: Catalog, loaded: Table) -> Pointer | Server | None:
    """Those that lead to a table; None if Spark has to change it."""
    kind = catalog.properties.get("type")
    if isinstance(catalog, ParsedOnce):
        return catalog
    if kind == "glue":
        from cdc_assets.lake.catalog.glue import glue_entries

        return glue_entries(catalog)
    if kind == "rest":
        from cdc_assets.lake.catalog.rest import rest_entries

        return rest_entries(catalog, loaded)
    return None


def edited(catalog: Catalog, loaded: Table, edit: Edit, found: Found | None = None) -> bool:
    """Commit ``edit`` of the table's newest metadata; False if Spark has to, and nothing was done.

    ``loaded``: the table as it was; its place is trusted. ``found``: its metadata then, if that has
    been read. If another commit comes first, the edit is made once more, of that one's metadata.
    Raises what ``edit`` raises, and what the catalog's client does if it went away: then nobody
    knows whether the commit is made, or will be.
    """
    lost: Unknown | None = None
    for _ in range(_TRIES):
        found = found or newest(catalog, loaded)
        if found is None:
            break
        new = {**found.metadata, "refs": {**found.metadata["refs"]}}
        if not edit(new):
            return True
        try:
            if _is_committed(found, loaded, new):
                return True
        except OnlySpark:
            break
        except Unknown as error:
            lost = error
        found = None
        time.sleep(_PAUSE_SECONDS)
    if lost is not None:
        raise lost
    return False


def _is_committed(found: Found, loaded: Table, new: Metadata) -> bool:
    """Whether the table has ``new`` metadata now. Raises OnlySpark and Unknown."""
    entries = found.entries
    if not isinstance(entries, Pointer):
        return entries.commit(loaded, found.metadata, new)
    removed, place = _follow(new, found.location), folder(found.location)
    at = found.written(new)
    if at is None:
        raise OnlySpark
    try:
        led = _is_led(entries, found, loaded, at)
    except OnlySpark:
        delete(found.io, [at], place)
        raise
    delete(found.io, removed if led else [at], place)
    return led


@dataclass(frozen=True, slots=True)
class Found:
    """A table's newest metadata, its place, and what leads there."""

    entries: Pointer | Server
    io: FileIO
    location: str
    metadata: Metadata

    def written(self, metadata: Metadata) -> str | None:
        """The place of a new file beside it; None where this process can't write."""
        new = _new_location(self.metadata, self.location)
        try:
            with self.io.new_output(new).create(overwrite=True) as file:  # its name is new
                file.write(to_json(metadata))
        except OSError as error:
            logger.info("%s can't be written here: %s", new, first_line(error))
            delete(self.io, [new], folder(new))
            return None
        return new


def newest(catalog: Catalog, loaded: Table) -> Found | None:
    """The newest metadata of a table, whose place is trusted; None where Spark has to commit."""
    entries = _entries(catalog, loaded)
    if entries is None:
        return None
    try:
        at = entries.led_to(loaded.name())
    except NoSuchTableError:
        return None
    io = load_file_io({**catalog.properties, **loaded.properties, **loaded.config}, at)
    try:
        metadata = read(io, at)
    except (OSError, ValueError):
        return None
    if not _is_fit(metadata, loaded, at):
        return None
    if metadata.get("encryption-keys") and not isinstance(entries, Pointer):
        return None  # pyiceberg tells no server of a snapshot's key
    return Found(entries, io, at, metadata)


def read(io: FileIO, location: str) -> Metadata:
    """The metadata of a file. Raises OSError, or ValueError if it has none."""
    with io.new_input(location).open() as file:
        content = file.read()
    if content.startswith(_GZIP):
        content = gzip.decompress(content)
    metadata: Metadata = from_json(content)
    return metadata


def _is_fit(metadata: Metadata, loaded: Table, base: str) -> bool:
    """Whether it is the metadata of the table, and its next file belongs where this one is."""
    trusted = folder(loaded.metadata_location)
    return (
        metadata.get("format-version") in _VERSIONS
        and metadata.get("table-uuid") == str(loaded.metadata.table_uuid)
        and metadata.get("location", "").rstrip("/") == loaded.location().rstrip("/")
        and all(isinstance(metadata.get(key), dict) for key in ("refs", "properties"))
        and metadata["properties"].get(_KEEP, "1").isdigit()
        and base.endswith(_SUFFIX)
        and not base.endswith(f".gz{_SUFFIX}")
        and metadata["properties"].get("write.metadata.compression-codec", "none") == "none"
        and folder(_new_location(metadata, base)) == folder(base) == trusted
    )


def folder(location: str) -> str:
    """The folder of a file's URI; Hadoop spells a local one with one slash."""
    return re.sub("^file:/+", "file:///", location.rpartition("/")[0])


def _new_location(metadata: Metadata, base: str) -> str:
    """A new name, with the number that follows that of ``base``.

    As Iceberg makes it: a table's provider of locations has no say in it. pyiceberg asks one, whose
    code the table's properties name.
    """
    number = base.rpartition("/")[2].partition("-")[0]
    place = metadata["properties"].get(TableProperties.WRITE_METADATA_PATH)
    place = place or f"{metadata['location'].rstrip('/')}/metadata"
    version = int(number) + 1 if number.isdigit() else 0
    return f"{place.rstrip('/')}/{version:05d}-{uuid.uuid4()}{_SUFFIX}"


def _follow(metadata: Metadata, base: str) -> list[str]:
    """Make it the metadata that follows ``base``; returns the files that it lists no more.

    Empty if the table keeps those.
    """
    properties = metadata["properties"]
    default = TableProperties.METADATA_PREVIOUS_VERSIONS_MAX_DEFAULT
    keep = max(1, int(properties.get(_KEEP, default)))
    former = [
        *metadata.get("metadata-log", []),
        {"timestamp-ms": metadata["last-updated-ms"], "metadata-file": base},
    ]
    metadata["metadata-log"] = former[-keep:]
    # Java's word for it: any other is no, where pyiceberg takes some for yes, and fails at others.
    deletes = properties.get(TableProperties.METADATA_DELETE_AFTER_COMMIT_ENABLED, "").lower()
    gone = former[:-keep] if deletes == "true" else []
    return [entry["metadata-file"] for entry in gone]


def _is_led(pointer: Pointer, found: Found, loaded: Table, new: str) -> bool:
    """Have the catalog lead from what was ``found`` to ``new``; False if it leads elsewhere by now.

    If the answer is lost it is asked once more: the second time changes nothing.
    """
    for left in reversed(range(_TRIES)):
        try:
            led = pointer.lead(loaded.name(), found.location, new)
            return led or _has_led(found, loaded, new)
        except _LOST:
            if not left:
                raise
            time.sleep(_PAUSE_SECONDS)
    raise AssertionError


def _has_led(found: Found, loaded: Table, new: str) -> bool:
    """Whether ``new`` is the table's metadata, or was, before another commit."""
    now = found.entries.led_to(loaded.name())
    if now == new:
        return True
    log = read(found.io, now).get("metadata-log", [])
    return any(entry["metadata-file"] == new for entry in log)


def delete(io: FileIO, paths: Iterable[str], place: str) -> None:
    """Delete metadata files in a folder, with the checksums that Spark writes beside local ones.

    A path elsewhere, which metadata may name, is passed over. All at once: pyarrow asks an object
    store three times for each.
    """
    ours = [path for path in paths if folder(path) == place]
    ours += [f"{place}/.{path.rpartition('/')[2]}.crc" for path in ours if path.startswith("file:")]
    # Each store says in its own way what failed, and what stays is an orphan.
    with suppress(Exception), ThreadPoolExecutor(_AT_ONCE) as pool:
        for path in ours:
            pool.submit(io.delete, path)
