"""What a table needs: slices of compaction, expiry, manifests."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from cdc_assets.config.sections import KeepSnapshotsConfig, MaintenanceConfig
from cdc_assets.maintenance.files import LiveFile
from cdc_assets.maintenance.plan import (
    SLICE_FILES,
    expiry,
    is_due,
    manifests_rewritten,
    next_slice,
    tiny_slice,
)

MB = 10**6
NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
WANTED = MaintenanceConfig()


def files(*sizes_mb: float, partition: str = "0", deleted: int = 0) -> list[LiveFile]:
    return [
        LiveFile(f"{partition}-{i}", partition, int(size * MB), 1000, deleted)
        for i, size in enumerate(sizes_mb)
    ]


def test_a_table_of_a_few_small_files_is_well() -> None:
    assert next_slice(files(1, 1, 1, 1, 128, 40), WANTED) is None


def test_enough_small_files_of_one_partition_are_rewritten() -> None:
    found = next_slice(files(1, 1, 1, 1, 1, 128), WANTED)
    assert found is not None
    assert found.options["max-files-to-rewrite"] == "5"
    assert found.options["min-file-size-bytes"] == str(32 * MB)
    spread = [file for p in range(4) for file in files(1, 1, partition=str(p))]
    assert next_slice(spread, WANTED) is None


def test_min_input_files_and_target_file_size_decide() -> None:
    two = MaintenanceConfig(min_input_files=2)
    assert next_slice(files(1, 1), WANTED) is None
    assert next_slice(files(1, 1), two) is not None
    small_target = MaintenanceConfig(min_input_files=2, target_file_size=16 * MB)
    assert next_slice(files(10, 10), two) is not None
    assert next_slice(files(10, 10), small_target) is None


def test_a_file_of_deleted_rows_is_rewritten_whatever_its_size() -> None:
    assert next_slice(files(128, deleted=100), WANTED) is None
    found = next_slice(files(128, 128, deleted=101), WANTED)
    assert found is not None
    assert found.options["delete-ratio-threshold"] == "0.1"
    assert found.options["min-file-size-bytes"] == "0"
    assert found.options["max-files-to-rewrite"] == "1"  # two would be two targets
    assert next_slice(files(128, deleted=101), MaintenanceConfig(deleted_rows=0.5)) is None


@given(st.lists(st.floats(0.001, 31), min_size=1, max_size=600))
def test_a_slice_is_bounded_by_one_target_file_whatever_it_picks(sizes: list[float]) -> None:
    small = files(*sizes)
    found = next_slice(small, WANTED)
    if found is None:
        assert len(small) < WANTED.min_input_files
        return
    number = int(found.options["max-files-to-rewrite"])
    assert 2 <= number <= SLICE_FILES
    largest = sorted((file.bytes for file in small), reverse=True)[:number]
    assert found.bytes == sum(largest)
    assert sum(largest) <= WANTED.target_file_size
    # A group that Iceberg packs full exceeds the target, so that it finds it worth rewriting.
    full = int(found.options["max-file-group-size-bytes"]) - 32 * MB
    assert full >= WANTED.target_file_size


def history(count: int, cursor_at: int | None, every: timedelta) -> list[tuple[datetime, bool]]:
    return [(NOW - i * every, i == cursor_at) for i in range(count)]


def test_snapshots_are_kept_by_count_and_by_age() -> None:
    minute = timedelta(minutes=1)
    assert expiry(history(20, 0, 10 * minute), [], WANTED, NOW) is None
    assert expiry(history(60, 0, minute), [], WANTED, NOW) is None
    found = expiry(history(100, 0, minute), [], WANTED, NOW)
    assert found is not None
    assert (found.snapshots, found.retain_last) == (39, 20)
    few = MaintenanceConfig(keep_snapshots=KeepSnapshotsConfig(count=3, age=timedelta(0)))
    kept = expiry(history(100, 0, minute), [], few, NOW)
    assert kept is not None
    assert (kept.snapshots, kept.retain_last) == (97, 3)


def test_invariant_7_the_newest_snapshot_that_names_the_cursor_is_never_expired() -> None:
    few = MaintenanceConfig(keep_snapshots=KeepSnapshotsConfig(count=1, age=timedelta(0)))
    found = expiry(history(100, 41, timedelta(hours=1)), [], few, NOW)
    assert found is not None
    assert found.retain_last == 42
    assert found.snapshots == 58


def test_snapshots_that_nothing_leads_to_go_by_age() -> None:
    old, young = NOW - timedelta(days=1), NOW - timedelta(minutes=1)
    found = expiry(history(1, 0, timedelta(0)), [old, young], WANTED, NOW)
    assert found is not None
    assert found.snapshots == 1


def test_manifests_are_rewritten_when_they_are_many_for_what_they_hold() -> None:
    assert not manifests_rewritten([7000] * 20)
    assert manifests_rewritten([7000] * 21)
    assert not manifests_rewritten([7 * 2**20] * 40)


def test_daily_work_is_daily() -> None:
    day = timedelta(days=1)
    assert is_due(None, NOW, day)
    assert is_due(NOW - day, NOW, day)
    assert not is_due(NOW - timedelta(hours=23), NOW, day)


def test_tiny_files_of_crowded_partitions_are_put_together_by_few_jobs() -> None:
    assert tiny_slice(files(*[0.1] * 7), 0) is None  # too few
    assert tiny_slice(files(*[1.5] * 50), 0) is None  # not tiny
    due = tiny_slice(files(*[0.1] * 20, 30, 3), 0)
    assert due is not None
    assert due.files == 20
    # Those of an older spec are maintenance's.
    old = [replace(file, spec_id=7) for file in files(*[0.1] * 20)]
    assert tiny_slice(old, 0) is None
    due = tiny_slice([*old, *files(*[0.1] * 9)], 0)
    assert due is not None
    assert due.files == 9
    # Of 500 partitions with eight each, so many that it takes some eight jobs.
    many = [file for i in range(500) for file in files(*[0.1] * 8, partition=str(i))]
    due = tiny_slice(many, 0)
    assert due is not None
    assert due.files == 64
    # What they become isn't tiny: files that an earlier slice left don't count.
    assert tiny_slice(files(*[3.0] * 40, *[0.1] * 7), 0) is None


def test_a_large_file_without_a_row_left_is_counted_before_small_ones_are_picked() -> None:
    """The planner picks it, whatever it is asked for."""
    empty = replace(files(100)[0], deleted=1000)
    small = files(*[0.1] * 30)
    assert tiny_slice([*small, empty], 0) is None
    found = next_slice([*small, empty, *files(100)], WANTED)
    assert found is not None
    assert (found.options["max-files-to-rewrite"], found.bytes) == ("1", 100 * MB)
    gone = [replace(file, deleted=1000) for file in small]
    assert tiny_slice(gone, 0) is not None  # they are small themselves
