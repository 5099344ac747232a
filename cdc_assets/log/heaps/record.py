"""Comparing a followed table's heaps with the recorded ones: added, removed, or another file.

Some changes of a table are in no stream: TRUNCATE of a single partition, ATTACH, DETACH and DROP of
one, and all writes while a table is unlogged. Each leaves a trace in the catalog: a new heap, a
missing heap, or another file (``relfilenode``) under a heap. Many harmless changes do, too. They
are distinguished as follows, given a moment at which the heaps were as recorded, and its *horizon*:
the transaction ID below which all were over by then.

- A file that holds a row of a transaction below the horizon was never emptied since: no transaction
  that was over by then can have written to a file made later, so the row was copied into it. VACUUM
  FULL, CLUSTER and a move to another tablespace do that, and keep the writer's ID in each row.
- A rewriting ALTER TABLE doesn't keep that ID, but changes a column in the same transaction, and
  rewrites all heaps of the table. One that doesn't rewrite changes columns, too, but no file.
- A TRUNCATE of the whole table is in the log. It empties all heaps in one transaction, so it
  doesn't explain a file made later by another one. The log is consulted only once it has reached
  the look.
- An added heap is usually empty. Rows loaded into it before it was attached were written by a
  transaction before the attaching one, or by an earlier command of that one.
- A removed heap took its rows along. In mode ``append`` the lake keeps them, as history. A heap
  that left and came again between two looks has its former file, but was attached by another
  transaction; changes of its rows meanwhile aren't in the stream either.

Not distinguished: a TRUNCATE of one partition beside a rewriting ALTER TABLE, between two looks;
rows loaded by a transaction that began after the attaching one, and ended before the attaching; a
TRUNCATE of one partition, if one of the whole table follows before the next look. An empty heap
whose file was copied counts as truncated, and so does one that pg_repack has written.

Pure; ``pins.heap_facts`` queries the source, and acts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from cdc_assets.errors import TableProblem
from cdc_assets.messages.texts import copy_anew
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of a look at heaps, or before it; ``horizon`` and ``lsn`` bound what was over then.

    ``horizon``: a transaction ID below which none was under way. ``lsn``: the end of WAL.
    """

    horizon: int
    lsn: Lsn


class HeapFile(NamedTuple):
    """A heap's file, and how the heap is attached to the table.

    ``link``: the transactions that attached it, and its parents, up to the table; None if not
    recorded.
    """

    filenode: int
    link: str | None = None


@dataclass(frozen=True, slots=True)
class KnownHeaps:
    """The recorded file of each heap, by oid, and the last moment at which the files were those.

    ``own``: that moment isn't the last look at the source. ``pending``: the LSN that the log has to
    reach before it shows whether a change is a TRUNCATE's. ``truncated``: the LSN of its last one.
    """

    files: Mapping[int, HeapFile]
    seen: Moment
    own: bool = False
    pending: Lsn | None = None
    truncated: Lsn | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """The oids of heaps that have another file, that came, and that left.

    A heap that left and came again is in both ``came`` and ``left``.
    """

    replaced: frozenset[int]
    came: frozenset[int]
    left: frozenset[int]

    def __bool__(self) -> bool:
        return bool(self.replaced or self.came or self.left)


def difference(known: Mapping[int, HeapFile], now: Mapping[int, HeapFile]) -> Difference:
    stayed = known.keys() & now.keys()
    again = {o for o in stayed if known[o].link is not None and known[o].link != now[o].link}
    return Difference(
        frozenset(oid for oid in stayed if known[oid].filenode != now[oid].filenode),
        frozenset((now.keys() - known.keys()) | again),
        frozenset((known.keys() - now.keys()) | again),
    )


@dataclass(frozen=True, slots=True)
class HeapTrace:
    """The source's evidence on a heap that has another file, or that came.

    ``kept``: it has rows from before the horizon. ``altered``: its columns were changed together
    with its file. ``loaded``: it has rows from before it came. ``changed_by``: the transaction that
    last changed its catalog entry. ``empty``: no row was found.
    """

    name: str
    kept: bool
    altered: bool
    loaded: bool
    changed_by: int
    empty: bool


Verdict = Literal["harmless", "undecided", "empty"] | TableProblem
"""``empty``: the whole table is empty, so a new copy of it costs nothing."""


def judge(
    table: TableId,
    known: KnownHeaps,
    found: Difference,
    traces: Mapping[int, HeapTrace],
    *,
    keeps_history: bool,
    flushed: Lsn | None,
) -> Verdict:
    """The meaning of a difference for the table; ``traces``: those of the heaps that are there."""
    if found.left and not keeps_history:
        several = "a partition" if len(found.left) == 1 else f"{len(found.left)} partitions"
        what = f"{several} of it left it, detached or dropped: rows that went along are never told"
        if found.left <= found.came:
            what = f"{several} of it left it and came again: what happened meanwhile is never told"
        return _problem(table, "partition_left", what)
    loaded = [traces[oid].name for oid in sorted(found.came) if traces[oid].loaded]
    if loaded:
        return _problem(
            table,
            "partition_attached",
            f"{', '.join(loaded)} was attached with rows in it, which are never sent",
        )
    stayed = known.files.keys() - found.left
    rewritten = found.replaced >= stayed
    doubtful = [
        oid
        for oid in found.replaced
        if not (traces[oid].kept or (traces[oid].altered and rewritten))
    ]
    if not doubtful:
        return "harmless"
    if known.pending is None or flushed is None or flushed < known.pending:
        return "undecided"
    if known.truncated is not None and known.truncated > known.seen.lsn:
        at_once = {traces[oid].changed_by for oid in doubtful}
        if len(at_once) == 1 and set(doubtful) == stayed:
            return "harmless"
    if set(known.files) == set(doubtful) and all(trace.empty for trace in traces.values()):
        return "empty"
    names = ", ".join(traces[oid].name for oid in sorted(doubtful)[:5])
    return _problem(
        table,
        "rows_replaced",
        f"{names} has another file than it had, with no row from before: it was truncated by"
        " itself, or unlogged for a while, and what happened then is never sent",
    )


def _problem(table: TableId, code: str, what: str) -> TableProblem:
    return TableProblem(table, f"{code}: {what}.", copy_anew(table))
