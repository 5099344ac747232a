"""Where a lake table's files are, by the configuration, which the catalog is checked against.

Anyone who may write in the catalog can lead a table to any metadata, and metadata names any file. A
SQL catalog, where the coordination role may write by default, is believed only as far as it has the
location that we give to that table. A REST or Glue catalog, where that role has no say, chooses
locations by itself, with names of its own: there a table is used wherever it is. Its files are
deleted only below the warehouse, if its metadata says that we made it from this very table, and no
other table's metadata is in its folder. ``lake.catalog.locations`` lists further valid ones.

These checks run before each use. Spark queries the catalog once more by itself, so an entry that
changes in between isn't noticed before the next use.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING

from pyarrow import fs
from pyiceberg.table import Table

from cdc_assets.errors import TableProblem
from cdc_assets.lake.catalog.files import trusted_places
from cdc_assets.lake.catalog.place import forgetting
from cdc_assets.log.staged.places import ForeignPath, Place, staged_places
from cdc_assets.log.staged.storage import Storage
from cdc_assets.messages.texts import command
from cdc_assets.postgres.names import safe_folder
from cdc_assets.process.home import at_home

if TYPE_CHECKING:
    from cdc_assets.lake.tables import LakeTable


class NotListed(TableProblem):
    """The table's files are in a store that can't be listed here: leftover files stay."""


def check(lake: LakeTable, loaded: Table) -> None:
    """Raise TableProblem if a SQL catalog leads to another place than the table's."""
    if lake.config.lake.catalog.type != "sql":
        return
    refuse_misled(lake, loaded)
    location, metadata = loaded.location(), loaded.metadata_location
    if not below([location, *lake.config.lake.catalog.locations], metadata):
        raise misled(lake, f"its metadata is {metadata}")


def misled(lake: LakeTable, found: str) -> TableProblem:
    """The problem of a catalog that leads to ``found``, which isn't the table's."""
    expected = lake.location or f"its folder below {lake.config.warehouse}"
    return TableProblem(
        lake.row.table,
        f"the catalog leads its lake table {lake.sql_name} elsewhere than to {expected}:"
        f" {found.rstrip('.')}. Nothing there is touched.",
        f"{at_home(lake.config.warehouse)}If that is right, say so in lake.catalog.locations (of an"
        " earlier warehouse: its URI)."
        f" If not, the catalog was tampered with: {forgetting(lake.config, lake.identifier)}; then"
        f" {command('resync', lake.row.table)}",
    )


def refuse_misled(lake: LakeTable, loaded: Table) -> None:
    """Raise TableProblem unless a table is where the configuration has it, and is the right one."""
    config, location = lake.config, loaded.location()
    trusted, chosen = trusted_places(config), config.lake.catalog.type != "sql"
    own = [] if chosen else [f"{u}/{lake.namespace}/{safe_folder(lake.name)}" for u in trusted]
    named = any(_same(location, uri) for uri in [*own, *config.lake.catalog.locations])
    if not named and not (chosen and below(trusted, location)):
        raise misled(lake, f"it is at {location}")
    if chosen and lake.table.adopt is None and not lake.is_made_by_us(loaded):
        raise TableProblem(
            lake.row.table,
            f"its lake table {lake.sql_name}, at {location}, says that it was made from another"
            " one, or by somebody else. Nothing there is touched.",
            "Rename that table in the catalog, and copy this one anew: cdc-assets resync"
            f" '{lake.row.table}'",
        )


def _same(one: str, other: str) -> bool:
    """Whether two URIs are of one folder, also where one has a symbolic link in it."""
    if one.rstrip("/") == other.rstrip("/"):
        return True
    with suppress(ForeignPath):
        parent, _, name = other.rstrip("/").rpartition("/")
        place = Place(parent, Storage(), literal=True)
        return place.below(place.path(one)) == name
    return False


def below(folders: list[str], uri: str) -> bool:
    """Whether the URI names something strictly below one of the folders."""
    for folder in folders:
        try:
            if Place(folder, Storage(), literal=True).holds(uri):
                return True
        except ForeignPath:  # of another kind of storage: compared as text, without dots
            inside = uri.startswith(f"{folder.rstrip('/')}/") and "/../" not in uri
            if "://" in folder and not folder.startswith(("file:", "s3:")) and inside:
                return True
    return False


def deletable(lake: LakeTable, loaded: Table | None = None) -> Place:
    """The place below which a lake table's files may be deleted, also of one gone from the catalog.

    Raises TableProblem if there is no such place: the table is elsewhere, or its folder overlaps
    the flusher's files, or has those of another table, or can't be listed (NotListed).
    """
    if loaded is not None:
        refuse_misled(lake, loaded)
    location = loaded.location() if loaded is not None else lake.location
    assert location is not None
    for staged in staged_places(lake.config):
        if (
            _same(location, staged.uri)
            or below([staged.uri], location)
            or below([location], staged.uri)
        ):
            raise TableProblem(
                lake.row.table,
                f"its files at {location} can't be told from staged files, which are below"
                f" {staged.uri}: what nobody needs there stays",
                "Have staging.uri, its former_uris and lake.catalog.warehouse apart from each"
                " other.",
            )
    given = loaded.io.properties if loaded is not None else None
    try:
        place = Place(location.rstrip("/"), Storage.of(lake.config.s3, given), literal=True)
    except ForeignPath as error:
        raise NotListed(
            lake.row.table,
            f"its files are at {location}, and only those of file:/// and s3:// can be listed:"
            " what nobody needs there stays",
            "Have it removed by Iceberg's remove_orphan_files, or by the catalog.",
        ) from error
    if loaded is not None and (other := _nested(lake, place, loaded)) is not None:
        raise TableProblem(
            lake.row.table,
            f"another table is in its lake table's folder {place.uri}: {other}. What nobody needs"
            " there can't be told apart, and stays",
            "Move that table; or, if nobody has it in a catalog any more, remove its files.",
        )
    return place


def _nested(lake: LakeTable, place: Place, loaded: Table) -> str | None:
    """A metadata file of another table in a table's folder, if there is any.

    In the subfolder ``metadata``, a file of an earlier table of the same name doesn't count, unless
    the catalog chose the folder: then the file may be anybody's.
    """
    chosen = lake.config.lake.catalog.type != "sql"
    log = [
        loaded.metadata_location,
        *(entry.metadata_file for entry in loaded.metadata.metadata_log),
    ]
    own = {place.path(uri) for uri in log if place.holds(uri)}
    selector = fs.FileSelector(place.root, recursive=True, allow_not_found=True)
    for info in place.filesystem.get_file_info(selector):
        if info.path.endswith(".metadata.json") and info.path not in own:
            name = place.below(info.path) or ""
            direct = name.count("/") == 1 and name.startswith("metadata/")
            if not direct or (chosen and not _is_of(place, info.path, loaded)):
                return str(info.path)
    return None


def _is_of(place: Place, path: str, loaded: Table) -> bool:
    """Whether a metadata file is the table's own: of a failed commit, or of an old one."""
    with place.filesystem.open_input_stream(path) as stream, suppress(ValueError, KeyError):
        return bool(json.loads(stream.read())["table-uuid"] == str(loaded.metadata.table_uuid))
    return False
