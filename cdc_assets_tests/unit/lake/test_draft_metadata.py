"""What a draft begins with, and how its snapshots come behind the lake table's."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from cdc_assets.lake.drafts.metadata import added, drafted, graft, is_draft_of, main_of

Metadata = dict[str, Any]


def snapshot(number: int, parent: int | None, **more: Any) -> dict[str, Any]:
    """Number 7 has the id 70."""
    found = {"snapshot-id": number * 10, "sequence-number": number, "schema-id": 0, **more}
    return found if parent is None else {**found, "parent-snapshot-id": parent}


@pytest.fixture
def table() -> Metadata:
    """Of format version 3, with three snapshots, the last of which a branch has."""
    return {
        "format-version": 3,
        "last-sequence-number": 3,
        "next-row-id": 100,
        "last-updated-ms": 5_000,
        "current-snapshot-id": 20,
        "schemas": [{"schema-id": 0}, {"schema-id": 1}],
        "partition-specs": [{"spec-id": 0}],
        "properties": {"theirs": "x"},
        "snapshots": [snapshot(1, None), snapshot(2, 10), snapshot(3, 20)],
        "refs": {
            "main": {"snapshot-id": 20, "type": "branch", "min-snapshots-to-keep": 7},
            "theirs": {"snapshot-id": 30, "type": "branch"},
        },
        "snapshot-log": [
            {"timestamp-ms": 1_000, "snapshot-id": 10},
            {"timestamp-ms": 2_000, "snapshot-id": 20},
        ],
        "metadata-log": [{"timestamp-ms": 1_000, "metadata-file": "former"}],
        "statistics": [{"snapshot-id": 10}],
    }


@pytest.fixture
def draft(table: Metadata) -> Metadata:
    """Of the table, with two commits, as Spark leaves it."""
    found = drafted(table)
    found["snapshots"] += [
        snapshot(4, 20, **{"first-row-id": 100}),
        snapshot(5, 40, **{"first-row-id": 100}),
    ]
    found["refs"]["main"]["snapshot-id"] = 50
    return {
        **found,
        "last-sequence-number": 5,
        "next-row-id": 120,
        "current-snapshot-id": 50,
        "last-updated-ms": 6_000,
    }


def test_a_draft_has_the_current_snapshot_alone_and_no_former_file(table: Metadata) -> None:
    before = copy.deepcopy(table)
    found = drafted(table)
    assert table == before
    assert found["snapshots"] == [snapshot(2, 10)]
    assert found["refs"] == {"main": {"snapshot-id": 20, "type": "branch"}}
    assert [entry["snapshot-id"] for entry in found["snapshot-log"]] == [20]
    assert found["metadata-log"] == found["statistics"] == []
    same = ("last-sequence-number", "next-row-id", "last-updated-ms", "schemas", "properties")
    assert all(found[key] == table[key] for key in same)


def test_its_snapshots_come_behind_the_others_and_one_into_the_history(
    table: Metadata, draft: Metadata
) -> None:
    new = added(draft, 20)
    assert new is not None and [s["snapshot-id"] for s in new] == [40, 50]
    assert is_draft_of(draft, table, new)
    before = copy.deepcopy(table)
    graft(table, draft, new)
    assert main_of(table) == table["current-snapshot-id"] == 50
    assert table["refs"]["main"]["min-snapshots-to-keep"] == 7
    assert table["refs"]["theirs"] == before["refs"]["theirs"]
    assert [s["snapshot-id"] for s in table["snapshots"]] == [10, 20, 30, 40, 50]
    assert table["snapshot-log"] == [
        *before["snapshot-log"],
        {"timestamp-ms": 6_000, "snapshot-id": 50},
    ]
    numbers = ("last-sequence-number", "next-row-id", "last-updated-ms")
    assert [table[key] for key in numbers] == [5, 120, 6_000]
    same = ("metadata-log", "statistics", "schemas", "properties")
    assert all(table[key] == before[key] for key in same)


def test_time_never_goes_back(table: Metadata, draft: Metadata) -> None:
    table["last-updated-ms"] = 9_000  # by somebody else's commit, whose clock is ahead
    new = added(draft, 20)
    assert new is not None
    graft(table, draft, new)
    assert table["last-updated-ms"] == table["snapshot-log"][-1]["timestamp-ms"] == 9_000


def _no_commit(draft: Metadata) -> None:
    draft["refs"]["main"]["snapshot-id"] = 20


def _of_another(draft: Metadata) -> None:
    draft["snapshots"][1]["parent-snapshot-id"] = 999


def _set_back(draft: Metadata) -> None:
    draft["refs"]["main"]["snapshot-id"] = 999


@pytest.mark.parametrize("change", [_no_commit, _of_another, _set_back])
def test_a_draft_without_commits_that_follow_the_snapshot_adds_none(
    draft: Metadata, change: Any
) -> None:
    change(draft)
    assert not added(draft, 20)


@pytest.mark.parametrize(
    "change",
    [
        {"last-sequence-number": 4},
        {"next-row-id": 101},
        {"schemas": [{"schema-id": 1}]},
        {"partition-specs": []},
        {"encryption-keys": [{"key-id": "k"}]},
        {"format-version": 4},
    ],
    ids=str,
)
def test_a_table_that_got_snapshots_or_lost_what_the_draft_was_written_with_is_another(
    table: Metadata, draft: Metadata, change: Metadata
) -> None:
    new = added(draft, 20)
    assert new is not None and is_draft_of(draft, table, new)
    assert not is_draft_of(draft, {**table, **change}, new)
    # A person's column, order or partitioning beside it is no matter.
    more = {"schemas": [*table["schemas"], {"schema-id": 2}], "current-schema-id": 2}
    assert is_draft_of(draft, {**table, **more}, new)
