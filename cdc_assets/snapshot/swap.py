"""A complete copy takes the lake table's place, in one step for its readers.

A coordinator may be taken for dead while its statement goes on in the server. The statement may end
long after another coordinator did the same and merges followed. Its rows must not win then:

- A table that doesn't exist yet is created with its rows. The catalog refuses a second creation.
- A table that has the copy's columns gets its rows by a draft, which is published like a merge
  (``lake.publish``): not once ``main`` has moved on.
- Any other table is replaced, and Iceberg does that regardless of commits meanwhile. A late
  replacement takes the table back to the copy, and by the same commit to the copy's cursor: the log
  is applied once more from there, or the table is parked if the log is gone.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyiceberg.table import Table
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from cdc_assets.errors import Fenced
from cdc_assets.lake.columns import PROPERTY
from cdc_assets.lake.copies import COPIED_AS, copied_as
from cdc_assets.lake.layout import arrange
from cdc_assets.lake.lost_reply import is_readable
from cdc_assets.lake.publish import published
from cdc_assets.lake.spark.session import summary
from cdc_assets.lake.spark.sql import listed
from cdc_assets.lake.state import lake_state
from cdc_assets.lake.tables import COPYING, LakeTable


def swap(session: SparkSession, lake: LakeTable, copy: LakeTable, said: Mapping[str, str]) -> None:
    """Replace the lake table's rows by those of ``copy``; ``said`` is the commit's summary.

    The caller holds the table's writer lock. Raises Fenced if somebody else came before.
    """
    before, made = lake.load(), copy.load()
    if before is not None and made is not None and _fits(before, made):
        _overwrite(session, lake, before, copy, said)
        return
    properties = {**lake.creation_properties(), COPIED_AS: copied_as(lake)}
    if before is not None:
        properties |= lake.properties_after(before)
    if before is not None and COPYING in before.properties:
        properties[COPYING] = ""  # an unfinished earlier copy is replaced
    make = "create table" if before is None else "create or replace table"
    clauses = lake.clauses(lake.table.partition_by, properties)
    try:
        with summary(session, said):
            session.sql(f"{make} {lake.sql_name} {clauses} as select * from {copy.sql_name}")
    except PySparkException as error:
        if before is None and lake.load() is not None:
            raise Fenced(f"{lake.row.table}: another coordinator came before.") from error
        raise


def settle(session: SparkSession, lake: LakeTable) -> None:
    """End what the copy began in the lake table, which has all rows. May be repeated.

    Its columns are known by their field ids from now on, as the configuration may give them other
    names. Not by pyiceberg, which can't write format version 3.
    """
    if (loaded := lake.load()) is None:
        return
    if not lake.recorded(loaded).fields:
        described = listed({PROPERTY: lake.described(loaded.schema()).dump()})
        session.sql(f"alter table {lake.sql_name} set tblproperties ({described})")
    # A dead coordinator may have left the first.
    left = [COPYING] if loaded.properties.get(COPYING) in ("", lake.copy_id) else []
    left += [COPIED_AS] if COPIED_AS in loaded.properties else []
    if left:
        names = ", ".join(f"'{name}'" for name in left)
        session.sql(f"alter table {lake.sql_name} unset tblproperties ({names})")


def _fits(before: Table, made: Table) -> bool:
    """Whether readers use the table and can read it, and its columns are those of the copy."""
    columns = [{f.name: str(f.field_type) for f in t.schema().fields} for t in (before, made)]
    return (
        columns[0] == columns[1]
        and before.current_snapshot() is not None
        and COPYING not in before.properties
        and is_readable(before)
    )


def _overwrite(
    session: SparkSession, lake: LakeTable, before: Table, copy: LakeTable, said: Mapping[str, str]
) -> None:
    lake.upgrade(session, before)
    arrange(session, lake, before)
    # Nothing is merged before the copy is complete, so the description may change before the rows.
    described = lake.described(before.schema()).dump()
    if before.properties.get(PROPERTY) != described:
        listing = listed({PROPERTY: described})
        session.sql(f"alter table {lake.sql_name} set tblproperties ({listing})")
    with (
        published(session, lake, lake_state(lake.load())) as draft,
        summary(session, said),
    ):
        session.table(copy.sql_name).writeTo(draft.sql_name).overwrite(F.lit(True))
