"""Turns changes of one relation, as they came, into rows of the staged schema: pure functions.

Staged files have the same columns for every table (design 5): ``_op _lsn _commit_lsn _ts _xid
_unchanged_cols _data``. Decisions made here, so that nothing is invented (invariant 8):

- An update that changes the key becomes two rows, ``D`` with the old key and ``U`` with the new
  row: applying them one after the other by key is right. If that ``U`` still has unchanged
  columns, their values are under the *old* key, so its object carries the old key in a member with
  an empty name (no Postgres identifier is empty): a JSON string of the object of its columns.
- A key change that brings a row into the publication's row filter comes as an ``I`` with unchanged
  columns. No row that was sent has their values: its old key is one of NULLs, which no row has.
- REPLICA IDENTITY FULL doesn't remove unchanged markers: their values are filled here from the OLD
  tuple.
- An update of a table without a key becomes ``D`` with all old columns, ``I`` with all new ones.
- A row is found by its key, or without one by all of its old columns. If the stream doesn't send
  those (a partition has another replica identity than its root, say), nothing of the table is
  staged: :class:`Unusable` says why.

Everything is columnar: see ``flusher.decode.tuples`` for reading, ``flusher.decode.json_text`` for
writing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cdc_assets.flusher.decode.changes import Changes
from cdc_assets.flusher.decode.json_text import ABSENT, NULL, TEXT, Member, escape, objects
from cdc_assets.flusher.decode.ranges import ranges
from cdc_assets.flusher.decode.specs import DecodeSpec
from cdc_assets.flusher.decode.tuples import fill, read
from cdc_assets.log.staged.files import STAGED_SCHEMA
from cdc_assets.masks import Mask as ValueMask
from cdc_assets.postgres import pgoutput
from cdc_assets.postgres.pgoutput import (
    DELETE,
    INSERT,
    OLD_ROW,
    POSTGRES_EPOCH_MICROSECONDS,
    TRUNCATE,
    UPDATE,
    Bytes,
    Ints,
    Mask,
    Relation,
    Tuples,
)

Codes = npt.NDArray[np.int8]

_CODE = np.zeros(256, np.int8)
_CODE[[INSERT, UPDATE, DELETE, TRUNCATE]] = [0, 1, 2, 3]


class Unusable(Exception):
    """A change can't be staged because of what its table is like at the source.

    ``lsn`` is the change's. Changes decoded with it aren't staged either; ``commit_lsn`` is that of
    the last transaction among them.
    """

    def __init__(self, why: str, lsn: int, commit_lsn: int) -> None:
        self.why = why
        self.lsn = lsn
        self.commit_lsn = commit_lsn
        super().__init__(why)


def truncated(lsn: int, commit_lsn: int, commit_time: int, xid: int) -> pa.Table:
    """The one row that records that the table was emptied here."""
    return _table(
        _CODE[[TRUNCATE]],
        np.array([lsn]),
        np.array([commit_lsn]),
        np.array([commit_time]),
        np.array([xid]),
        pa.nulls(1, pa.string()),
        pa.array([b"{}"]),
    )


def invalid_text(table: pa.Table) -> int:
    """How many rows hold bytes that no UTF-8 text has (only SQL_ASCII databases send them)."""
    return int(table.schema.metadata.get(b"invalid", b"0")) if table.schema.metadata else 0


class Plan:
    """How the changes of one relation are read; ``layout``: what that depends on.

    Changes of several relations whose layouts are equal can be read as if they were of one.
    """

    def __init__(self, spec: DecodeSpec, relation: Relation) -> None:
        self.relation = relation
        self.names = names = [column.name for column in relation.columns]
        self.kept = [i for i, name in enumerate(names) if name not in spec.excluded]
        masks = dict(spec.masks)
        self.masks = tuple((i, masks[names[i]]) for i in self.kept if names[i] in masks)
        self.doubt, self.filtered = spec.doubt, spec.filtered
        # Old tuples have the columns of the replica identity, whatever the key was before. Under
        # FULL they have all columns, and the key is the catalog's.
        self.key = [i for i, c in enumerate(relation.columns) if c.is_key]
        if relation.replica_identity == "f":
            self.key = [names.index(name) for name in spec.key_columns if name in names]
            if len(self.key) < len(spec.key_columns):
                self.key = []
        known = tuple(names), tuple(self.kept), tuple(self.key)
        self.layout = (*known, self.doubt, self.masks, self.filtered)

    def rows(self, batch: Changes) -> tuple[pa.Table, Ints]:
        """One padded batch: read the tuples, pick the rows to be staged, write them.

        Also returns where the rows of each change end. Raises ReplicationProblem if a message
        doesn't match the relation, and Unusable for a change whose row can't be identified.
        """
        buffer = batch.message
        start = np.concatenate((np.zeros(1, np.int64), batch.stop[:-1]))
        tuples, new, old = read(batch, self.relation, start)
        marker = buffer[start]
        width = len(self.names)
        raw = ranges(buffer, _by_tuple(tuples.first), _by_tuple(tuples.stop))
        if self.masks:
            raw = _masked(raw, self.masks, tuples)
        # A large value has copies enough.
        del buffer
        batch = replace(batch, message=np.empty(0, np.uint8))
        filled = fill(tuples, new, old)
        self._check_rows(batch, marker, tuples, new, old)
        op = _CODE[batch.op]
        split = self._splits(raw, width, op, new, old, tuples, filled)
        # A change that splits is staged twice: first the old row, then the new one.
        row = (
            np.arange(len(start))
            if not split.any()
            else np.repeat(np.arange(len(start)), 1 + split)
        )
        tuple_of, code = new[row], op[row]
        if split.any():
            gone = np.flatnonzero(split) + np.arange(int(split.sum()))
            tuple_of[gone], code[gone] = old[row[gone]], _CODE[DELETE]
            if not self.key:
                code[gone + 1] = _CODE[INSERT]
        deleted = code == _CODE[DELETE]
        values = escape(raw)
        del raw
        members, unchanged = self._members(tuples, filled, tuple_of, deleted)
        if unchanged is not None and self.key:
            values, member = self._old_key(values, width, old, row, code, unchanged, split)
            members += member
        data = objects(len(row), values, members)
        rows = _table(
            code,
            batch.lsn[row],
            batch.commit_lsn[row],
            batch.commit_time[row],
            batch.xid[row],
            self._unchanged_names(unchanged, len(row)),
            data,
        )
        return rows, np.cumsum(1 + split)

    def _check_rows(
        self, batch: Changes, marker: Bytes, tuples: Tuples, new: Ints, old: Ints
    ) -> None:
        """Raise Unusable for the first change that doesn't identify its row."""
        if self.key:
            known = (tuples.kind[self.key] == pgoutput.TEXT).all(axis=0)
            odd = ~known[new] | ((old >= 0) & ~known[np.maximum(old, 0)])
            names = ", ".join(self.names[column] for column in self.key)
            why = f"doesn't say the value of its key ({names})"
        else:
            odd = (batch.op != INSERT) & (marker != OLD_ROW)
            why = "doesn't say all of the old row, and the table has no key"
        if not bool(odd.any()):
            # Only an update's new row may leave out values: they exist elsewhere.
            left_out = (tuples.kind == pgoutput.UNCHANGED).any(axis=0)
            odd = (old >= 0) & left_out[old]
            if not (self.filtered and self.key):
                odd |= (batch.op == INSERT) & left_out[new]
            why = "leaves a value out that is nowhere else"
        if self.doubt:
            odd, why = np.ones_like(odd), self.doubt
        if bool(odd.any()):
            first = int(np.argmax(odd))
            raise Unusable(why, int(batch.lsn[first]), int(batch.commit_lsn[-1]))

    def _splits(
        self,
        raw: pa.LargeBinaryArray,
        width: int,
        op: Codes,
        new: Ints,
        old: Ints,
        tuples: Tuples,
        filled: Mask | None,
    ) -> Mask:
        """Which changes are staged as two rows: updates of the key; without a key, all updates."""
        split: Mask = (op == _CODE[UPDATE]) & (old >= 0) & (old != new)
        if not self.key or not split.any():
            return split
        which = np.flatnonzero(split)
        before, after = old[which], new[which]
        differs = np.zeros(len(which), np.bool_)
        for column in self.key:
            same_place = np.zeros(len(which), np.bool_) if filled is None else filled[column][after]
            one = raw.take(pa.array(before * width + column))
            other = raw.take(pa.array((after - same_place) * width + column))
            kinds = tuples.kind[column]
            differs |= ~pc.equal(one, other).to_numpy(zero_copy_only=False)
            differs |= kinds[before] != kinds[after]
        split[which] = differs
        return split

    def _members(
        self, tuples: Tuples, filled: Mask | None, tuple_of: Ints, deleted: Mask
    ) -> tuple[list[Member], Mask | None]:
        """The object's members, and which kept columns are unchanged in which row (if any are)."""
        members: list[Member] = []
        unchanged: Mask | None = None
        some_deleted = bool(deleted.any()) and bool(self.key)
        base = tuple_of * len(self.names)
        for place, column in enumerate(self.kept):
            value = base + column
            kinds = tuples.kind[column]
            if filled is not None:
                value = value - np.where(filled[column][tuple_of], len(self.names), 0)
            if not some_deleted and bool((kinds == pgoutput.TEXT).all()):
                members.append(Member(self.names[column], TEXT, value))
                continue
            kind = kinds[tuple_of]
            state = np.where(kind == pgoutput.TEXT, TEXT, NULL)
            missing = kind == pgoutput.UNCHANGED
            if bool(missing.any()):
                if unchanged is None:
                    unchanged = np.zeros((len(tuple_of), len(self.kept)), np.bool_)
                unchanged[:, place] = missing & ~deleted
                state[missing] = ABSENT
            if some_deleted and column not in self.key:
                state[deleted] = ABSENT
            members.append(Member(self.names[column], state, value))
        return members, unchanged

    def _old_key(
        self,
        values: pa.LargeBinaryArray,
        width: int,
        old: Ints,
        row: Ints,
        code: Codes,
        unchanged: Mask,
        split: Mask,
    ) -> tuple[pa.LargeBinaryArray, list[Member]]:
        """The empty-named member of inserts and key changes that left columns unchanged."""
        came = code == _CODE[INSERT]
        carry = np.flatnonzero(
            ((split[row] & (code == _CODE[UPDATE])) | came) & unchanged.any(axis=1)
        )
        if len(carry) == 0:
            return values, []
        known = np.where(came[carry], NULL, TEXT)
        before = np.maximum(old[row[carry]], 0) * width
        keys = objects(
            len(carry), values, [Member(self.names[c], known, before + c) for c in self.key]
        )
        state = np.zeros(len(row), np.int64)
        value = np.zeros(len(row), np.int64)
        state[carry], value[carry] = TEXT, len(values) + np.arange(len(carry))
        return pa.concat_arrays([values, escape(keys)]), [Member("", state, value)]

    def _unchanged_names(self, unchanged: Mask | None, count: int) -> pa.StringArray:
        """The JSON array of each row's unchanged columns, null where there is none."""
        if unchanged is None or not unchanged.any():
            return pa.nulls(count, pa.string())
        patterns, which = np.unique(np.packbits(unchanged, axis=1), axis=0, return_inverse=True)
        masks = np.unpackbits(patterns, axis=1, count=len(self.kept)).astype(np.bool_)
        names = [self.names[column] for column in self.kept]
        texts = [
            json.dumps([n for n, m in zip(names, mask, strict=True) if m], ensure_ascii=False)
            if mask.any()
            else None
            for mask in masks
        ]
        return pa.array(texts, pa.string()).take(pa.array(which.reshape(-1)))


def _masked(
    raw: pa.LargeBinaryArray, masks: Sequence[tuple[int, ValueMask]], tuples: Tuples
) -> pa.LargeBinaryArray:
    """``raw``, one tuple after the other, with the masks of some columns' texts."""
    parts, place, end = [raw], np.arange(len(raw)), len(raw)
    for column, mask in masks:
        cells = np.flatnonzero(tuples.kind[column] == pgoutput.TEXT) * len(tuples.kind) + column
        parts.append(mask.array(raw.take(pa.array(cells))))
        place[cells] = end + np.arange(len(cells))
        end += len(cells)
    return pa.concat_arrays(parts).take(pa.array(place))


def _by_tuple(positions: Ints) -> Ints:
    """(columns, tuples) to one tuple after the other, which is how they lie in the buffer."""
    return np.ascontiguousarray(positions.T).reshape(-1)


@cache
def _ops() -> pa.StringArray:
    """Not made at import: pyarrow then imports pandas, 35 MB that the receiver doesn't need."""
    return pa.array(["I", "U", "D", "T"], pa.string())


def _table(
    code: Codes,
    lsn: Ints,
    commit_lsn: Ints,
    commit_time: Ints,
    xid: Ints,
    unchanged: pa.StringArray,
    data: pa.LargeBinaryArray,
) -> pa.Table:
    schema, text = STAGED_SCHEMA, data
    try:
        text = data.cast(pa.large_string())  # checks that it is UTF-8
    except pa.ArrowInvalid:
        repaired = [value.decode("utf-8", "replace") for value in data.to_pylist()]
        before = data.to_pylist()
        count = sum(a.encode() != b for a, b in zip(repaired, before, strict=True))
        schema = schema.with_metadata({b"invalid": str(count).encode()})
        text = pa.array(repaired, pa.large_string())
    return pa.Table.from_arrays(
        [
            pa.DictionaryArray.from_arrays(pa.array(code, pa.int8()), _ops()),
            pa.array(lsn),
            pa.array(commit_lsn),
            pa.array(commit_time + POSTGRES_EPOCH_MICROSECONDS, pa.timestamp("us", "UTC")),
            pa.array(xid),
            unchanged,
            text,
        ],
        schema=schema,
    )
