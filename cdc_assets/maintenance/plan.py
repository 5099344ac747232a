"""The care that a table needs: pure functions of its files, manifests and snapshots.

Compaction is planned in *slices*: what one call of ``rewrite_data_files`` may rewrite while it
holds the table's writer lock. Iceberg's planner picks the files; the options made here bound it to
about one target file, which takes seconds, however large the table is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from cdc_assets.config.sections import MaintenanceConfig
from cdc_assets.maintenance.files import LiveFile

# The most files of a slice: opening one costs as much as reading some hundred kilobytes.
SLICE_FILES = 500
# A file of a quarter of the target is good to read, and rewriting it again wouldn't pay.
_SMALL = 0.25
# A reader opens each of them. Writers put small ones together (lake.tables), up to their size.
MANY_MANIFESTS = 20
_MANIFEST_BYTES = 8 * 2**20  # commit.manifest.target-size-bytes
_NEVER = 2**31 - 1
# How far clocks may be off: the database's, which says what is old, a flusher's or a store's, which
# dates a file, and Spark's, with which Iceberg refuses a grace of less than a day. Stores refuse
# what is signed further off.
CLOCKS_APART = timedelta(minutes=15)
# The most steps of a move to another partition spec: each looks at all files of the table.
_MOVES = 16


@dataclass(frozen=True, slots=True)
class Slice:
    """One call's options for ``rewrite_data_files``; ``files`` and ``bytes`` are its bounds.

    If ``moved`` names files, these are moved to the table's present partition spec instead.
    """

    options: Mapping[str, str]
    files: int
    bytes: int
    moved: tuple[str, ...] = ()


def next_slice(
    files: Sequence[LiveFile], wanted: MaintenanceConfig, spec_id: int = 0
) -> Slice | None:
    """The slice to rewrite next; None if there is none. ``spec_id``: the table's present spec.

    The order: files of an older partition spec, which Iceberg's planner ignores; small files, where
    their partition has enough of them; files with many deleted rows, whatever their size. Most
    deleted rows are recent and so lie in small files, whose rewriting removes them, too. Large
    files without a row left come before small ones: the planner picks them whatever is asked for,
    so a slice has to count them.
    """
    if old := [file for file in files if file.spec_id != spec_id and file.deleted < file.rows]:
        return _moved(old, wanted)
    small_bytes = int(wanted.target_file_size * _SMALL)
    small = [file for file in files if file.bytes < small_bytes]
    counts = Counter(file.partition for file in small)
    crowded = [file for file in small if counts[file.partition] >= wanted.min_input_files]
    if crowded and not _has_empty(files, small_bytes):
        number = max(2, _fitting(crowded, wanted.target_file_size))
        return _slice(crowded, number, wanted, min_file_size_bytes=small_bytes)
    hollow = [file for file in files if file.deleted > wanted.deleted_rows * file.rows]
    if hollow:
        number = max(1, _fitting(hollow, wanted.target_file_size))
        return _slice(hollow, number, wanted, delete_ratio_threshold=wanted.deleted_rows)
    return None


# Between two maintenance runs: files below a sixteenth of this are tiny, and eight of a partition a
# crowd. A row is written again until its file isn't tiny. Each partition is a job of Spark.
_THINNED = MaintenanceConfig(target_file_size=16 * 10**6, min_input_files=8)
_TINY_BYTES = _THINNED.target_file_size // 16
_THINNED_FILES = 64


def tiny_slice(files: Sequence[LiveFile], spec_id: int) -> Slice | None:
    """The tiny files to put together next; None if there is no crowd of them.

    None, too, where a large file has no row left: the planner would pick it with them.
    """
    if _has_empty(files, _TINY_BYTES):
        return None
    tiny = [file for file in files if file.bytes < _TINY_BYTES and file.spec_id == spec_id]
    counts = Counter(file.partition for file in tiny)
    crowded = [file for file in tiny if counts[file.partition] >= _THINNED.min_input_files]
    if not crowded:
        return None
    number = min(_fitting(crowded, _THINNED.target_file_size), _THINNED_FILES)
    return _slice(crowded, number, _THINNED, min_file_size_bytes=_TINY_BYTES)


def _has_empty(files: Sequence[LiveFile], least_bytes: int) -> bool:
    """Whether all rows of a file of so many bytes are deleted."""
    return any(file.deleted >= file.rows and file.bytes >= least_bytes for file in files)


def _moved(files: Sequence[LiveFile], wanted: MaintenanceConfig) -> Slice:
    share = max(wanted.target_file_size, sum(file.bytes for file in files) // _MOVES)
    number = max(SLICE_FILES, len(files) // _MOVES)
    chosen, size = list[str](), 0
    for file in files[:number]:
        if chosen and size + file.bytes > share:
            break
        chosen.append(file.path)
        size += file.bytes
    return Slice({}, len(chosen), size, tuple(chosen))


def _fitting(files: Sequence[LiveFile], limit_bytes: int) -> int:
    """How many of ``files``, whichever are picked, have no more than ``limit_bytes`` together."""
    size = number = 0
    for file in sorted(files, key=lambda file: -file.bytes):
        size += file.bytes
        if size > limit_bytes:
            break
        number += 1
    return min(number, SLICE_FILES)


def _slice(
    files: Sequence[LiveFile],
    number: int,
    wanted: MaintenanceConfig,
    *,
    min_file_size_bytes: int = 0,
    delete_ratio_threshold: float = 1.0,
) -> Slice:
    largest = sorted((file.bytes for file in files), reverse=True)[:number]
    target = wanted.target_file_size
    options = {
        "target-file-size-bytes": str(target),
        "min-file-size-bytes": str(min_file_size_bytes),
        "max-file-size-bytes": str(2**62),  # large files stay as they are
        # A full group is then larger than the target, which is reason enough to rewrite it.
        "max-file-group-size-bytes": str(target * 3 // 2),
        "min-input-files": str(wanted.min_input_files),
        "max-files-to-rewrite": str(number),
        "delete-file-threshold": str(_NEVER),  # version 3: one deletion vector a file at most
        "delete-ratio-threshold": str(delete_ratio_threshold),
    }
    return Slice(options, min(number, len(files)), sum(largest))


def manifests_rewritten(manifest_bytes: Sequence[int]) -> bool:
    """Whether there are many more manifests than their content needs."""
    needed = math.ceil(sum(manifest_bytes) / _MANIFEST_BYTES)
    return len(manifest_bytes) > MANY_MANIFESTS and len(manifest_bytes) > 4 * needed


@dataclass(frozen=True, slots=True)
class Expiry:
    """Which snapshots go: those older than ``older_than`` and not of the last ``retain_last``."""

    older_than: datetime
    retain_last: int
    snapshots: int


def expiry(
    ancestors: Sequence[tuple[datetime, bool]],
    others: Sequence[datetime],
    wanted: MaintenanceConfig,
    now: datetime,
) -> Expiry | None:
    """The snapshots to expire; None if there are none.

    ``ancestors`` of ``main``, the newest first: when each was made, and whether it names the
    cursor. The newest that names it is kept whatever its age, with all that came after it
    (invariant 7). ``others`` are snapshots that no branch or tag leads to.
    """
    cursor = next((i for i, (_, names_it) in enumerate(ancestors) if names_it), -1)
    keep = max(wanted.keep_snapshots.count, cursor + 1)
    older_than = now - wanted.keep_snapshots.age
    gone = [at for at, _ in ancestors[keep:] if at < older_than]
    gone += [at for at in others if at < older_than]
    return Expiry(older_than, keep, len(gone)) if gone else None


def orphaned_before(now: datetime, wanted: MaintenanceConfig) -> datetime:
    """A file that nobody refers to goes if it is dated before that, by whichever clock."""
    return now - wanted.orphan_grace - CLOCKS_APART


def is_due(last: datetime | None, now: datetime, every: timedelta) -> bool:
    """Whether work that is done once in ``every`` is to be done now."""
    return last is None or now - last >= every
