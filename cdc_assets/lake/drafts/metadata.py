"""The metadata of a lake table and of a draft of it, as their files have it. Pure.

A draft has the current snapshot alone, so that its commits cost the same however long the table's
history is; and no former file, so that Spark deletes none.
"""

from __future__ import annotations

from typing import Any

from cdc_assets.lake.catalog.commits import Metadata

MAIN = "main"


def main_of(metadata: Metadata) -> int | None:
    """The id of the snapshot that ``main`` is at."""
    found = metadata["refs"].get(MAIN) or {}
    at: int | None = found.get("snapshot-id", metadata.get("current-snapshot-id"))
    return at


def drafted(metadata: Metadata) -> Metadata:
    """The metadata that a draft of the table begins with."""
    at = main_of(metadata)
    return {
        **metadata,
        "snapshots": [s for s in metadata["snapshots"] if s["snapshot-id"] == at],
        "refs": {MAIN: {"snapshot-id": at, "type": "branch"}},
        "snapshot-log": [{"timestamp-ms": metadata["last-updated-ms"], "snapshot-id": at}],
        "metadata-log": [],
        "statistics": [],
        "partition-statistics": [],
    }


def added(draft: Metadata, base: int) -> list[dict[str, Any]] | None:
    """A draft's own snapshots, the oldest first; None if they don't all follow ``base``."""
    by_id = {s["snapshot-id"]: s for s in draft["snapshots"]}
    found, at = list[dict[str, Any]](), main_of(draft)
    while at != base:
        snapshot = by_id.get(at)
        if snapshot is None:
            return None
        found.append(snapshot)
        at = snapshot.get("parent-snapshot-id")
    return found[::-1]


def is_draft_of(draft: Metadata, metadata: Metadata, snapshots: list[dict[str, Any]]) -> bool:
    """Whether a draft's ``snapshots`` fit behind the table's, as its metadata is now.

    They do unless the table got other snapshots since, or lost what they were written with.
    """
    sequence = snapshots[0]["sequence-number"] - 1
    specs = [{p["spec-id"] for p in m["partition-specs"]} for m in (draft, metadata)]
    schemas = {s["schema-id"] for s in metadata["schemas"]}
    return (
        metadata["format-version"] == draft["format-version"]
        and metadata["last-sequence-number"] == sequence
        and metadata.get("next-row-id", 0) == snapshots[0].get("first-row-id", 0)
        and all(s.get("schema-id") in {None, *schemas} for s in snapshots)
        and specs[0] <= specs[1]
        and draft.get("encryption-keys") == metadata.get("encryption-keys")
    )


def graft(metadata: Metadata, draft: Metadata, snapshots: list[dict[str, Any]]) -> None:
    """Add a draft's ``snapshots`` to the table's metadata, and move ``main`` to the last of them.

    The history gets that one alone: readers of a moment meet no part of a change. The table's time
    is the later one of both: each is Spark's.
    """
    head = snapshots[-1]
    metadata["snapshots"] = [*metadata["snapshots"], *snapshots]
    for name in ("last-sequence-number", "next-row-id"):
        if name in draft:
            metadata[name] = draft[name]
    metadata["last-updated-ms"] = max(metadata["last-updated-ms"], draft["last-updated-ms"])
    kept = metadata["refs"].get(MAIN, {"type": "branch"})
    metadata["refs"][MAIN] = {**kept, "snapshot-id": head["snapshot-id"]}
    metadata["current-snapshot-id"] = head["snapshot-id"]
    entry = {"timestamp-ms": metadata["last-updated-ms"], "snapshot-id": head["snapshot-id"]}
    metadata["snapshot-log"] = [*metadata.get("snapshot-log", []), entry]
