"""Reads the tuples of a batch of changes of one relation: pure functions, columnar.

An update may come with its old tuple, or with the old key alone. See ``postgres.pgoutput`` for the
bytes; what is staged of the tuples is decided in ``flusher.decode.rows``.
"""

from __future__ import annotations

import numpy as np

from cdc_assets.errors import ReplicationProblem
from cdc_assets.flusher.decode.changes import Changes
from cdc_assets.postgres import pgoutput
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.pgoutput import (
    INSERT,
    NEW_ROW,
    OLD_KEY,
    OLD_ROW,
    UPDATE,
    Ints,
    Mask,
    Relation,
    TornTuple,
    Tuples,
)


def read(batch: Changes, relation: Relation, start: Ints) -> tuple[Tuples, Ints, Ints]:
    """All tuples in order; and numbers of each change's new (or only) tuple and its old one.

    The old one is -1 if there is none. A delete's only tuple is both. ``start``: where each change
    begins. Raises ReplicationProblem if a change doesn't match the relation.
    """
    buffer, stop, width = batch.message, batch.stop, len(relation.columns)
    marker = buffer[start]
    has_old = (marker == OLD_KEY) | (marker == OLD_ROW)
    wanted = np.where(batch.op == INSERT, ~has_old, has_old | (batch.op == UPDATE))
    _check(batch, relation, wanted & (has_old | (marker == NEW_ROW)), "no such kind of row")
    every = np.arange(len(start))
    first = _walk(batch, relation, every, start + 1)
    two = has_old & (batch.op == UPDATE)
    if not bool(two.any()):
        _check(batch, relation, first.end == stop, "more bytes than columns")
        return first, every, np.where(has_old, every, -1)
    both = np.flatnonzero(two)
    end = first.end.copy()
    # Behind the last one there is padding, which is no row.
    _check(batch, relation, (buffer[end] == NEW_ROW) | ~two, "no new row")
    second = _walk(batch, relation, both, end[both] + 1)
    end[both] = second.end
    _check(batch, relation, end == stop, "more bytes than columns")
    at = np.arange(len(start)) + np.cumsum(two) - two
    new = at + two
    total = len(start) + len(both)
    merged = Tuples(
        np.empty((width, total), np.uint8),
        np.empty((width, total), np.int64),
        np.empty((width, total), np.int64),
        end,
    )
    for into, one, other in (
        (merged.kind, first.kind, second.kind),
        (merged.first, first.first, second.first),
        (merged.stop, first.stop, second.stop),
    ):
        into[:, at] = one
        into[:, new[both]] = other
    return merged, new, np.where(has_old, at, -1)


def _walk(batch: Changes, relation: Relation, changes: Ints, position: Ints) -> Tuples:
    try:
        return pgoutput.walk(batch.message, position, batch.stop[changes], len(relation.columns))
    except TornTuple as torn:
        raise _broken(batch, relation, int(changes[torn.number]), torn.what) from torn


def _check(batch: Changes, relation: Relation, fits: Mask, otherwise: str) -> None:
    if not bool(fits.all()):
        raise _broken(batch, relation, int(np.argmin(fits)), otherwise)


def _broken(batch: Changes, relation: Relation, change: int, what: str) -> ReplicationProblem:
    table, kind = TableId(relation.schema, relation.name), chr(batch.op[change])
    return pgoutput.broken(f"a change ({kind}) of {table} with {what}", int(batch.lsn[change]))


def fill(tuples: Tuples, new: Ints, old: Ints) -> Mask | None:
    """Take unchanged values of new tuples from their old ones, where those have them.

    Marks these values as text in ``tuples`` and returns a mask of them: their text is in the tuple
    just before. None if there are none.
    """
    which = np.flatnonzero((old >= 0) & (old != new))
    if len(which) == 0:
        return None
    after = new[which]
    here = (tuples.kind[:, after] == pgoutput.UNCHANGED) & (
        tuples.kind[:, old[which]] == pgoutput.TEXT
    )
    if not here.any():
        return None
    filled = np.zeros(tuples.kind.shape, np.bool_)
    filled[:, after] = here
    tuples.kind[filled] = pgoutput.TEXT
    return filled
