"""One atomic change of a lake table: which action applies a batch."""

from __future__ import annotations

from cdc_assets.materializer.actions.commit import Change, Merged
from cdc_assets.materializer.actions.counted import merge_counted
from cdc_assets.materializer.actions.history import append_history
from cdc_assets.materializer.actions.keyed import merge_keyed
from cdc_assets.materializer.actions.marked import mark_all


def merge(change: Change) -> Merged:
    """Apply the batch in one step. Raises errors of Spark and Iceberg; readers see no change then.

    Raises Fenced if the table isn't in the state that the batch was cut for.
    """
    if change.lake.row.mode == "append":
        return append_history(change)
    if change.lake.row.mode == "soft_delete" and change.facts.truncate is not None:
        return mark_all(change)
    if change.lake.row.key_columns:
        return merge_keyed(change)
    return merge_counted(change)
