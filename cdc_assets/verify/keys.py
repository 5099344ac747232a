"""Duplicate keys in a lake table: new files are looked at first, and the others in turn.

A commit that adds a row whose key is there already makes a duplicate. So a pass looks at the data
files that were added since the last one: their keys are counted together with those of every file
that may have the same ones, by the bounds of each file in the table's metadata. The rest of its
budget goes to a round over all other files, which are looked at in the same way, in turn; so older
duplicates are found, too.

Only the key's columns are read, by this process and not by Spark: a pass takes no core from a
merge, no lock, and about a second, however large the table is. Where all files may have all keys
(random ones, in a large table) a budget isn't enough for every pair; a pass then takes some at
random, and reports how many of how many.

A pass that finds duplicates doesn't move on: the next one reads the same files and finds them
again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from hashlib import blake2b
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.avro.file import AvroFile
from pyiceberg.conversions import from_bytes
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io.pyarrow import ArrowScan
from pyiceberg.manifest import (
    DATA_FILE_TYPE,
    MANIFEST_ENTRY_SCHEMAS,
    DataFile,
    DataFileContent,
    ManifestContent,
    ManifestEntry,
    ManifestFile,
)
from pyiceberg.schema import Schema
from pyiceberg.table import FileScanTask, Table
from pyiceberg.types import PrimitiveType

from cdc_assets.errors import CdcError
from cdc_assets.log.verified import KeysSeen

# Keys that a pass reads: about a second of one core for numbers, some seconds for long texts.
BUDGET_ROWS = 10_000_000
# Keys whose duplicates one pass looks for; other files' keys are compared with these.
PROBED_ROWS = 1_000_000
# A round over unchanged files begins no more often than this.
ROUND_EVERY = timedelta(days=1)
# Of the Iceberg specification: the field of a deletion vector that names its data file.
_REFERENCED = next(
    place for place, field in enumerate(DATA_FILE_TYPE[3].fields) if field.field_id == 143
)

_START = (-1, "")


@dataclass(frozen=True, slots=True)
class KeysLooked:
    """What a pass found and covered.

    ``duplicated`` keys occur more than once, in ``rows``. The pass looked at ``looked`` of
    ``changed`` new files and, for the round, at ``turned`` others; it read the keys of ``met`` of
    the ``meant`` files that may have the same. The round has covered ``share`` of the table's rows.
    """

    seen: KeysSeen
    duplicated: int = 0
    rows: int = 0
    changed: int = 0
    looked: int = 0
    turned: int = 0
    met: int = 0
    meant: int = 0
    read_rows: int = 0
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class DataFileTask:
    """A live data file with its deletes, and its first column's bounds where they are known."""

    place: tuple[int, str]
    task: FileScanTask
    rows: int
    low: Any
    high: Any


def look(
    table: Table,
    key: Sequence[str],
    seen: KeysSeen | None,
    now: datetime,
    budget: int = BUDGET_ROWS,
) -> KeysLooked | None:
    """One pass over ``table``; None if it has no snapshot yet.

    ``seen`` is what the last pass returned. Raises CdcError where it can't be done.
    """
    snapshot = table.current_snapshot()
    if snapshot is None:
        return None
    lake_table = str(table.metadata.table_uuid)
    if seen is None or seen.lake_table != lake_table:
        seen = KeysSeen(lake_table, snapshot.snapshot_id, _START, 1)
    due = seen.round_ended is not None and now - seen.round_ended >= ROUND_EVERY
    if snapshot.snapshot_id == seen.snapshot_id and not seen.behind and not due:
        return KeysLooked(seen)
    schema = table.schema().select(*key)
    if not all(isinstance(field.field_type, PrimitiveType) for field in schema.fields):
        raise CdcError(f"arrays ({', '.join(key)}) aren't compared as keys.", "verify does it.")
    files = data_files(table, schema)
    changed = [file for file in files if file.place > seen.new]
    most = min(budget // 2, PROBED_ROWS)
    looked = _take(changed, most)
    new = looked[-1].place if looked else seen.new
    done = replace(
        seen, snapshot_id=snapshot.snapshot_id, new=new, behind=len(changed) - len(looked)
    )
    turned: list[DataFileTask] = []
    if due and not done.behind:
        at = seen.round or _START
        most -= sum(file.rows for file in looked)
        others = [file for file in files if at < file.place <= seen.new]
        turned = _take(others, most) if most > 0 else []
        at = turned[-1].place if turned else at
        ended = len(turned) == len(others)
        done = replace(done, round=None if ended else at)
        done = replace(done, round_ended=now) if ended else done
    elif seen.round_ended is None and not done.behind:
        done = replace(done, round_ended=now)  # all files were new, and each was looked at
    found = _count(table, schema, [*looked, *turned], files, budget, seen)
    total, behind = sum(file.rows for file in files), done.round or new
    share = sum(file.rows for file in files if file.place <= behind) / max(1, total)
    return replace(
        found,
        seen=seen if found.duplicated else done,
        changed=len(changed),
        looked=len(looked),
        turned=len(turned),
        share=share,
    )


def _take(files: Sequence[DataFileTask], rows: int) -> list[DataFileTask]:
    """The first files with up to ``rows`` rows together, one at least."""
    taken: list[DataFileTask] = []
    size = 0
    for file in files:
        size += file.rows
        if taken and size > rows:
            break
        taken.append(file)
    return taken


def _count(
    table: Table,
    schema: Schema,
    probes: Sequence[DataFileTask],
    files: Sequence[DataFileTask],
    budget: int,
    seen: KeysSeen,
) -> KeysLooked:
    """Count the keys of ``probes`` that occur more than once in ``files``.

    If the budget isn't enough for all of ``files``, ``seen`` seeds the random choice.
    """
    if not probes:
        return KeysLooked(seen)
    names = [field.name for field in schema.fields]
    mine = _read(table, schema, probes)
    keys = mine.group_by(names).aggregate([])
    firsts = _sorted(keys[names[0]])
    places = {file.place for file in probes}
    others = [file for file in files if file.place not in places and _may_have(file, firsts)]
    left = budget - len(mine)
    met = others
    if sum(file.rows for file in others) > left:
        others.sort(key=lambda file: blake2b(f"{seen!r} {file.place}".encode()).digest())
        met = _take(others, left)
    parts, read = [mine], len(mine)
    for file in met:  # one at a time: only probed keys are kept
        rows = _read(table, schema, [file])
        read += len(rows)
        parts.append(rows.join(keys, names, join_type="left semi").select(names))
    counted = pa.concat_tables(parts, promote_options="permissive")
    counted = counted.group_by(names).aggregate([([], "count_all")])
    copies = counted.filter(pc.greater(counted["count_all"], 1))["count_all"]
    return KeysLooked(
        seen,
        len(copies),
        pc.sum(copies).as_py() or 0,
        met=len(met),
        meant=len(others),
        read_rows=read,
    )


def _read(table: Table, schema: Schema, files: Iterable[DataFileTask]) -> pa.Table:
    scan = ArrowScan(table.metadata, table.io, schema, AlwaysTrue())
    return scan.to_table([file.task for file in files])


def _sorted(values: pa.ChunkedArray) -> list[Any] | None:
    """Distinct values, sorted, in the form of Iceberg's bounds; None where they have no order."""
    kind = values.type
    if pa.types.is_date32(kind):
        values = values.cast(pa.int32())
    elif pa.types.is_timestamp(kind):
        values = values.cast(pa.int64())
    elif pa.types.is_floating(kind):
        return None  # NaN is in no order, and in no bounds
    return sorted(value for value in pc.unique(values).to_pylist() if value is not None)


def _may_have(file: DataFileTask, firsts: list[Any] | None) -> bool:
    """Whether the bounds of ``file`` hold one of ``firsts``."""
    if firsts is None or file.low is None or file.high is None:
        return True
    at = bisect_left(firsts, file.low)
    return at < len(firsts) and bool(firsts[at] <= file.high)


def data_files(table: Table, schema: Schema) -> list[DataFileTask]:
    """The live data files in the order of their places, each with its own delete files.

    ``schema``: the columns to be read. Raises CdcError where deletes can't be read here.
    """
    snapshot = table.current_snapshot()
    assert snapshot is not None
    first = schema.fields[0]
    kind, field_id = first.field_type, first.field_id
    data: list[ManifestEntry] = []
    of_file: dict[str, set[DataFile]] = {}
    of_any: set[DataFile] = set()
    for manifest in snapshot.manifests(table.io):
        if manifest.content == ManifestContent.DATA:
            data += manifest.fetch_manifest_entry(table.io)
            continue
        targets = _targets(table, manifest)
        for entry, target in zip(manifest.fetch_manifest_entry(table.io), targets, strict=True):
            if entry.data_file.content == DataFileContent.EQUALITY_DELETES:
                raise CdcError(
                    "another writer wrote equality deletes, which aren't read here.",
                    "Have them rewritten (rewrite_data_files), or resync the table.",
                )
            if target is None:
                of_any.add(entry.data_file)
            else:
                of_file.setdefault(target, set()).add(entry.data_file)
    found = []
    for entry in data:
        file = entry.data_file
        low, high = (
            from_bytes(kind, bound) if isinstance(kind, PrimitiveType) and bound else None
            for bound in (
                (file.lower_bounds or {}).get(field_id),
                (file.upper_bounds or {}).get(field_id),
            )
        )
        deletes = of_file.get(file.file_path, set()) | of_any
        found.append(
            DataFileTask(
                (entry.sequence_number or 0, file.file_path),
                FileScanTask(file, delete_files=deletes),
                file.record_count,
                low,
                high,
            )
        )
    return sorted(found, key=lambda file: file.place)


def _targets(table: Table, manifest: ManifestFile) -> list[str | None]:
    """The data file that each live entry of a delete manifest names, None if it names none.

    pyiceberg 0.12 reads manifests as if of format version 2, where a deletion vector names none.
    """
    opened = AvroFile[ManifestEntry](
        table.io.new_input(manifest.manifest_path),
        MANIFEST_ENTRY_SCHEMAS[3],
        read_types={-1: ManifestEntry, 2: DataFile},
    )
    with opened as entries:
        return [entry.data_file[_REFERENCED] for entry in entries if int(entry.status) != 2]
