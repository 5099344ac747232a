"""The tables that copies land in, beside those that they replace."""

from __future__ import annotations

from pyarrow import fs
from pyiceberg.table import Table

from cdc_assets.lake.catalog.catalog import open_catalog
from cdc_assets.lake.place import deletable
from cdc_assets.lake.tables import COPYING, LakeTable

SUFFIX = "__copy_"


def is_copy(copy: LakeTable, loaded: Table) -> bool:
    """Whether a table of a copy's name is one that a copy of this very table lands in."""
    return COPYING in loaded.properties and copy.is_made_by_us(loaded)


def drop_copy(copy: LakeTable, loaded: Table) -> tuple[int, int]:
    """Drop a table that a copy landed in, with its folder; returns the deleted files and bytes.

    The catalog forgets the table first. Files elsewhere that its metadata names are left alone.
    """
    place = deletable(copy, loaded)
    open_catalog(copy.config).drop_table(copy.identifier)
    selector = fs.FileSelector(place.root, recursive=True, allow_not_found=True)
    return place.delete(i.path for i in place.filesystem.get_file_info(selector) if i.is_file)
