"""The change by a truncate in mode soft_delete: every row that isn't marked yet is marked."""

from __future__ import annotations

from pyspark.sql import functions as F

from cdc_assets.config.tables import DELETED_AT, LSN, SYNCED_AT
from cdc_assets.lake.publish import append, published
from cdc_assets.materializer.actions.commit import Change, Merged


def mark_all(change: Change) -> Merged:
    """Apply a truncate, a batch of its own here: every row not yet marked is marked deleted."""
    session, lake, state = change.session, change.lake, change.state
    at = change.events.agg(F.max("ts")).collect()[0][0]
    told = {SYNCED_AT: "current_timestamp()", LSN: f"{int(change.lsn)}L"}
    marked = [f"{DELETED_AT} = timestamp_micros({at})"]
    marked += [f"{name} = {told[name]}" for name in lake.table.metadata]
    marks = f"update {{}} set {', '.join(marked)} where {DELETED_AT} is null"
    with published(session, lake, state) as draft:
        deleted = session.table(lake.sql_name).where(f"{DELETED_AT} is null").count()
        if deleted:
            session.sql(marks.format(draft.sql_name))
        append(session, lake, state, draft, change.cursor)
    return Merged(0, deleted)
