"""The tables that copies land in, beside those that they replace.

All files of a copy have the same columns, so its table records those that it was begun with.
"""

from __future__ import annotations

import json
import time

import pyarrow as pa
from pyarrow import fs
from pyiceberg.table import Table

from cdc_assets.errors import TableProblem
from cdc_assets.lake.catalog.catalog import open_catalog
from cdc_assets.lake.drafts.tables import forget_drafts
from cdc_assets.lake.place import deletable
from cdc_assets.lake.tables import COPYING, LakeTable
from cdc_assets.messages.texts import command
from cdc_assets.postgres.types import arrow_type

SUFFIX = "__copy_"
# A table property, until the copy is complete: its columns' numbers, names and types.
COPIED_AS = "cdc.copied-as"
COPIED_VERSION = "2"
# How far clocks may be apart that date a table's snapshots: half of Iceberg's minute, so that one
# that drifts is told before it is in the way.
MOST_APART_SECONDS = 30.0


def create_for_copy(lake: LakeTable) -> Table:
    """Create the table, unless it exists, for files that a copy adds.

    Of format version 2, unpartitioned, without a snapshot: pyiceberg, which adds the files, doesn't
    write version 3 yet; the first merge upgrades the table.
    """
    properties = {
        **lake.creation_properties(),
        "format-version": COPIED_VERSION,
        "write.delete.mode": "copy-on-write",
        COPYING: lake.copy_id,
        COPIED_AS: copied_as(lake),
    }
    catalog = open_catalog(lake.config)
    catalog.create_namespace_if_not_exists(lake.namespace)
    return catalog.create_table_if_not_exists(
        lake.identifier,
        pa.schema(
            [
                *(pa.field(c.name, arrow_type(c.mapping.lake)) for c in lake.columns),
                *(pa.field(name, arrow_type(kind)) for name, kind in lake.extra.items()),
            ]
        ),
        lake.location,
        properties=properties,
    )


def copied_as(lake: LakeTable) -> str:
    """The columns as the configuration has them, to be compared with what a copy recorded."""
    return json.dumps([(c.source.number, c.name, c.mapping.lake) for c in lake.columns])


def refuse_other_columns(lake: LakeTable, loaded: Table) -> None:
    """Raise TableProblem if the copy in the table ``loaded`` was begun with other columns.

    Its rows would have values under each other's names, or of a column that is excluded now. An
    earlier version's copy has no record, and none is left once the copy is complete.
    """
    begun = loaded.properties.get(COPIED_AS)
    if begun is not None and begun != copied_as(lake):
        table = lake.row.table
        raise TableProblem(
            table,
            "columns.rename, exclude or types isn't what it was when its copy began",
            f"Put it back, or have the table copied anew: {command('resync', table)}",
        )


def data_folder(loaded: Table) -> str:
    """Where a copy's workers write its files."""
    return f"{loaded.location().rstrip('/')}/data"


def refuse_later(lake: LakeTable, loaded: Table) -> None:
    """Raise TableProblem if ``loaded`` was changed at a later time than it is here.

    No Spark reads a table whose history goes back by more than a minute; pyiceberg writes it.
    """
    ahead = loaded.metadata.last_updated_ms / 1000 - time.time()
    if ahead > MOST_APART_SECONDS:
        raise TableProblem(
            lake.row.table,
            f"its lake table was changed by a clock that is {ahead:.0f} s ahead of this machine's"
            " now: another machine's, or its own before it was set back",
            "Have all machines synchronize their clocks (chrony, NTP); the copy goes on once that"
            " time has come.",
        )


def is_copy(copy: LakeTable, loaded: Table) -> bool:
    """Whether a table of a copy's name is one that a copy of this very table lands in."""
    return COPYING in loaded.properties and copy.is_made_by_us(loaded)


def drop_copy(copy: LakeTable, loaded: Table) -> tuple[int, int]:
    """Drop a table that a copy landed in, with its folder; returns the deleted files and bytes.

    The catalog forgets the table first. Files elsewhere that its metadata names are left alone.
    """
    place = deletable(copy, loaded)
    open_catalog(copy.config).drop_table(copy.identifier)
    forget_drafts(copy, loaded)
    selector = fs.FileSelector(place.root, recursive=True, allow_not_found=True)
    return place.delete(i.path for i in place.filesystem.get_file_info(selector) if i.is_file)
