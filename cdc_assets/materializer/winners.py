"""The rows that a batch leaves, found here, without a Spark job.

It applies where a batch is small enough to be sent in a statement. A key's last change has its
whole row (invariant 8), and everything before it is passed over; but the changes of a key that some
update left columns out of are folded in order, and what they don't have is in the table.
``materializer.fold`` is for all other batches. Both give the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cdc_assets.log.batch import Facts, NamedKey
from cdc_assets.log.staged.texts import texts
from cdc_assets.materializer.events import Events
from cdc_assets.materializer.fold import Event, Folded, fold_relinked

# Of staged files, compressed; and of text.
_STAGED_BYTES, _TEXT_BYTES = 32 * 10**6, 90 * 10**6
# Of a statement, which carries the rows along; those that lack columns are in it twice. A Connect
# server takes 128 MiB.
_STATEMENT_BYTES = 100 * 10**6
# Changes that are folded one by one, in Python: 10 to 25 µs each, and up to 1 kB.
_ODD_CHANGES = 20_000


@dataclass(frozen=True, slots=True)
class Winners:
    """A batch's last change of each key.

    ``rows``: those that stay, as a struct ``row`` of texts. ``keys``: all of them, as a struct
    ``key``; ``earlier``: those that had a row at the source before the batch, since their first
    change is no insert. ``partial``: rows that stay and lack columns, with ``key`` and ``row``;
    ``unknown`` names the columns, whose values the table's row ``source`` has; ``moved``: whether
    the row had another key meanwhile.
    """

    rows: pa.Table
    keys: pa.Table
    earlier: pa.Table
    partial: pa.Table

    @property
    def upserted(self) -> int:
        return len(self.rows) + len(self.partial)

    @property
    def deleted(self) -> int:
        return len(self.keys) - self.upserted


def winners(
    batch: Events, facts: Facts, key: Sequence[str], columns: Sequence[str]
) -> Winners | None:
    """The winners of the batch's rows, None for a batch that Spark has to fold.

    ``key``, ``columns``: names at the source. O(rows) time, and memory for a few times _TEXT_BYTES.
    """
    if sum(entry.rows.byte_size for entry in batch.entries) > _STAGED_BYTES:
        return None
    if (events := batch.rows(_TEXT_BYTES)) is None:
        return None
    if facts.truncate is not None:
        events = events.filter(pc.greater(events["off"], facts.truncate))
    found = texts(events["data"], list(dict.fromkeys([*key, *columns])))
    named = found.select(list(key))
    codes = _codes([named[name].combine_chunks() for name in key], len(named))
    last = np.sort(_last(codes))
    whole, folded = last, list[Folded]()
    if facts.unchanged:
        odd = np.unique(codes[_odd(events, named, facts)])
        among = np.isin(codes, odd)
        if np.count_nonzero(among) > _ODD_CHANGES:
            return None
        whole = last[~among[last]]
        folded = _folded(events.filter(pa.array(among)), key)
    first = np.sort(_first(codes))
    inserts = pc.equal(events["op"], "I").to_numpy()
    stays = pc.not_equal(events["op"], "D").to_numpy()
    rows = found.select(list(columns)).take(whole[stays[whole]])
    stay = [(one, _unknown(one, key, columns)) for one in folded if one.op != "D"]
    known = [_row(one, key) for one, unknown in stay if unknown is None]
    lacking = [(one, unknown) for one, unknown in stay if unknown is not None]
    won = Winners(
        pa.concat_tables([_structs(rows, "row"), _made(known, "row", columns)]),
        _structs(named.take(last), "key"),
        _structs(named.take(first[~inserts[first]]), "key"),
        _partial(lacking, key, columns),
    )
    return won if won.rows.nbytes + 2 * won.partial.nbytes <= _STATEMENT_BYTES else None


def _codes(key: Sequence[pa.StringArray], length: int) -> npt.NDArray[np.int64]:
    """A number for each of ``length`` changes, equal where the key is; ``key``: its columns."""
    codes = np.zeros(length, np.int64)
    for number, column in enumerate(key):
        found = column.dictionary_encode()
        codes = codes * len(found.dictionary) + found.indices.to_numpy()
        if number:  # small again before the next column: their product might not fit
            codes = np.unique(codes, return_inverse=True)[1]
    return codes


def _last(codes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The positions of each key's last change."""
    last = np.zeros(int(codes.max(initial=-1)) + 1, np.int64)
    np.maximum.at(last, codes, np.arange(len(codes)))
    return last


def _first(codes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The positions of each key's first change."""
    first = np.full(int(codes.max(initial=-1)) + 1, len(codes))
    np.minimum.at(first, codes, np.arange(len(codes)))
    return first


def _odd(events: pa.Table, named: pa.Table, facts: Facts) -> npt.NDArray[np.bool_]:
    """The changes that left columns out, and those of the keys that these changed."""
    found: npt.NDArray[np.bool_] = events["unchanged"].is_valid().to_numpy()
    if not facts.relinked:
        return found
    columns = [[(name, text) for text in named[name].to_pylist()] for name in named.column_names]
    keys: list[NamedKey] = list(map(frozenset, zip(*columns, strict=True)))
    return np.logical_or(found, [one in facts.relinked for one in keys])


def _folded(events: pa.Table, key: Sequence[str]) -> list[Folded]:
    columns = (events[name].to_pylist() for name in ("off", "op", "unchanged", "data"))
    return fold_relinked((Event(*one) for one in zip(*columns, strict=True)), key)


def _row(one: Folded, key: Sequence[str]) -> dict[str, str | None]:
    return one.values | dict(zip(key, one.key, strict=True))


def _unknown(one: Folded, key: Sequence[str], columns: Sequence[str]) -> list[str] | None:
    """The columns whose values are in the table."""
    if one.source is None:
        return None
    return [name for name in columns if name not in one.values and name not in key] or None


def _partial(
    lacking: Sequence[tuple[Folded, list[str]]], key: Sequence[str], columns: Sequence[str]
) -> pa.Table:
    def keys(name: str, of: Sequence[Sequence[str | None] | None]) -> pa.Table:
        return _made([dict(zip(key, one or (), strict=True)) for one in of], name, key)

    some = [one for one, _ in lacking]
    table = _made([_row(one, key) for one in some], "row", columns)
    table = table.append_column("key", keys("key", [one.key for one in some])["key"])
    table = table.append_column("source", keys("source", [one.source for one in some])["source"])
    table = table.append_column("moved", pa.array([one.moved for one in some], pa.bool_()))
    unknown = [names for _, names in lacking]
    return table.append_column("unknown", pa.array(unknown, pa.list_(pa.string())))


def _made(rows: Sequence[dict[str, str | None]], name: str, columns: Sequence[str]) -> pa.Table:
    """As :func:`_structs`, of these values."""
    found = {one: pa.array([row.get(one) for row in rows], pa.string()) for one in columns}
    return _structs(pa.table(found), name)


def _structs(table: pa.Table, name: str) -> pa.Table:
    columns = [column.combine_chunks() for column in table.columns]
    fields = [pa.field(n, pa.string()) for n in table.column_names]
    return pa.table({name: pa.StructArray.from_arrays(columns, fields=fields)})
