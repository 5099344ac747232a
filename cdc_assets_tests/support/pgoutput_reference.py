"""A plain, strict pgoutput decoder, frame by frame, and an encoder: the decoder's tests trust them.

Written from the protocol's documentation, slow and obvious on purpose; shares no code with the
columnar one. What the protocol doesn't have is Refused.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from cdc_assets_tests.support.staged_rows import Row

UNCHANGED = object()
Value = str | bytes | None | object


@dataclass(frozen=True, slots=True)
class Spec:
    """How a relation is to be staged."""

    key_columns: tuple[str, ...]
    excluded: frozenset[str] = frozenset()


class Refused(Exception):
    """The stream isn't what protocol 1 says."""


class Unusable(Exception):
    """A change doesn't say which row it is of, or what that row is."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a Relation message said; of each column its name, its type's oid and its modifier."""

    identity: str
    columns: tuple[tuple[str, int, int], ...]
    key: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, *_ in self.columns)


def xlog(lsn: int, message: bytes) -> bytes:
    return b"w" + struct.pack(">QQq", lsn, lsn, 0) + message


def keepalive(wal_end: int, reply: bool = False) -> bytes:
    return b"k" + struct.pack(">QqB", wal_end, 0, reply)


def begin(commit_lsn: int, at: int, xid: int) -> bytes:
    return b"B" + struct.pack(">QqI", commit_lsn, at, xid)


def commit(commit_lsn: int, end_lsn: int, at: int) -> bytes:
    return b"C" + struct.pack(">BQQq", 0, commit_lsn, end_lsn, at)


def relation(
    oid: int, columns: Sequence[str], key: Sequence[str] = (), identity: str = "d", name: str = "t"
) -> bytes:
    body = b"R" + struct.pack(">I", oid) + b"public\0" + name.encode() + b"\0" + identity.encode()
    body += struct.pack(">H", len(columns))
    for column in columns:
        body += struct.pack(">B", column in key) + column.encode() + b"\0"
        body += struct.pack(">Ii", 25, -1)
    return body


def tuple_(values: Sequence[Value]) -> bytes:
    out = struct.pack(">H", len(values))
    for value in values:
        if value is None:
            out += b"n"
        elif value is UNCHANGED:
            out += b"u"
        else:
            raw = value if isinstance(value, bytes) else str(value).encode()
            out += b"t" + struct.pack(">I", len(raw)) + raw
    return out


def insert(oid: int, new: Sequence[Value]) -> bytes:
    return b"I" + struct.pack(">I", oid) + b"N" + tuple_(new)


def update(
    oid: int, new: Sequence[Value], old: Sequence[Value] | None = None, mark: bytes = b"K"
) -> bytes:
    before = b"" if old is None else mark + tuple_(old)
    return b"U" + struct.pack(">I", oid) + before + b"N" + tuple_(new)


def delete(oid: int, old: Sequence[Value], mark: bytes = b"K") -> bytes:
    return b"D" + struct.pack(">I", oid) + mark + tuple_(old)


def truncate(*oids: int) -> bytes:
    return b"T" + struct.pack(">IB", len(oids), 0) + struct.pack(f">{len(oids)}I", *oids)


# A commit's time is so far from 2000 at most, in microseconds.
FURTHEST = 60 * 10**15


class _Reader:
    """The fields of one message, in order; Refused where it is too short, or an LSN too large."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        if self.at + size > len(self.data):
            raise Refused(f"{size} bytes at {self.at} of {len(self.data)}")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, size: int, *, signed: bool = False) -> int:
        return int.from_bytes(self.take(size), signed=signed)

    def lsn(self) -> int:
        found = self.number(8)
        _must(found < 2**63, "an LSN")
        return found

    def time(self) -> int:
        found = self.number(8, signed=True)
        _must(abs(found) <= FURTHEST, "a time")
        return found

    def string(self) -> bytes:
        end = self.data.find(0, self.at)
        _must(end >= 0, "a string without an end")
        return self.take(end + 1 - self.at)[:-1]

    def name(self) -> str:
        try:
            return self.string().decode()
        except UnicodeDecodeError as error:
            raise Refused("a name that is no text") from error

    def end(self) -> None:
        _must(self.at == len(self.data), f"{len(self.data) - self.at} bytes too many")


def _must(fits: bool, otherwise: str) -> None:
    if not fits:
        raise Refused(otherwise)


class Reference:
    """Decodes frame by frame; ``rows`` are all of the committed transactions.

    What is wrong with the rows of a transaction is raised at its commit, and is ``torn`` before.
    ``unusable``: the relations of which something can't be staged; of open transactions, too.
    """

    def __init__(self, specs: Mapping[int, Spec], position: int = 0) -> None:
        self.specs = specs
        self.relations: dict[int, Told] = {}
        self.rows: list[Row] = []
        self.ends: list[tuple[int, int]] = []
        """Of each commit: where it ends, and how many rows there are up to it."""
        self.transaction: list[Row] | None = None
        self.torn: Refused | None = None
        self.unusable: set[int] = set()
        self.position = position

    def feed(self, frame: bytes) -> None:
        """Raises Refused."""
        reader = _Reader(frame)
        if reader.take(1) == b"k":
            end, _, _ = reader.lsn(), reader.number(8), reader.number(1)
            reader.end()
            if self.transaction is None:
                self.position = max(self.position, end)
            return
        _must(frame[:1] == b"w", "a frame of another kind")
        self.lsn = reader.number(8)
        reader.take(16)
        kind = reader.take(1)
        body = _Reader(frame[reader.at :])
        read = {
            b"B": self._begin,
            b"C": self._commit,
            b"R": self._relation,
            b"T": self._truncate,
            b"Y": self._type,
            b"O": self._origin,
            b"M": self._message,
        }.get(kind)
        if kind in (b"I", b"U", b"D"):
            self._change(kind.decode(), body)
            return
        if read is None:
            raise Refused(f"a message of kind {kind!r}")
        read(body)
        body.end()

    def _begin(self, body: _Reader) -> None:
        _must(self.transaction is None, "a transaction inside another")
        self.commit_lsn, self.microseconds, self.xid = body.lsn(), body.time(), body.number(4)
        _must(self.commit_lsn >= self.position, "a transaction from before what is safe")
        self.at = datetime(2000, 1, 1, tzinfo=UTC) + timedelta(microseconds=self.microseconds)
        self.transaction, self.torn = [], None

    def _commit(self, body: _Reader) -> None:
        _must(body.number(1) == 0, "flags of a commit")
        commit_lsn, end, at = body.lsn(), body.lsn(), body.time()
        _must(self.transaction is not None, "a commit of nothing")
        assert self.transaction is not None
        _must((commit_lsn, at) == (self.commit_lsn, self.microseconds), "another one's commit")
        _must(end >= commit_lsn, "a commit that ends before it begins")
        if self.torn is not None:
            raise self.torn
        self.rows += self.transaction
        self.ends.append((end, len(self.rows)))
        self.transaction = None
        self.position = max(self.position, end)

    def _relation(self, body: _Reader) -> None:
        self._inside()
        oid, _, _ = body.number(4), body.name(), body.name()
        identity, count = body.take(1).decode("latin-1"), body.number(2)
        _must(identity in "dfin", "a replica identity")
        columns, key = [], []
        for _ in range(count):
            flags, name = body.number(1), body.name()
            _must(flags <= 1, "flags of a column")
            columns.append((name, body.number(4), body.number(4, signed=True)))
            key += [name] * flags
        names = {name for name, *_ in columns}
        _must(len(names) == count and "" not in names, "names of columns")
        self.relations[oid] = Told(identity, (*columns,), (*key,))

    def _truncate(self, body: _Reader) -> None:
        self._inside()
        _must(self.lsn <= self.commit_lsn, "a truncate behind its commit")
        count, options = body.number(4), body.number(1)
        _must(count > 0 and options <= 3, "a truncate")
        for _ in range(count):
            oid = body.number(4)
            _must(oid in self.relations, "a relation of which nothing was told")
            self._add(oid, "T", {}, None)

    def _type(self, body: _Reader) -> None:
        self._inside()
        body.number(4)
        body.string()
        _must(body.string() != b"", "a type without a name")

    def _origin(self, body: _Reader) -> None:
        self._inside()
        body.take(8)
        body.string()

    def _message(self, body: _Reader) -> None:
        _must(body.number(1) <= 1, "flags of a message")
        body.take(8)
        body.string()
        body.take(body.number(4))

    def _inside(self) -> None:
        _must(self.transaction is not None, "a change outside of a transaction")

    def _change(self, op: str, body: _Reader) -> None:
        self._inside()
        _must(self.lsn <= self.commit_lsn, "a change behind its commit")
        oid = body.number(4)
        told = self.relations.get(oid)
        if told is None:
            raise Refused("a change of a relation of which nothing was told")
        if oid not in self.specs:
            _must(len(body.data) >= 7, "no row")
            return
        try:
            tuples: dict[str, dict[str, Value]] = {}
            while body.at < len(body.data):
                mark = body.take(1).decode("latin-1")
                _must(mark not in tuples, "two rows of one kind")
                tuples[mark] = dict(zip(told.names, _tuple(body, len(told.names)), strict=True))
            marks = "".join(tuples)
            _must(marks in {"I": "N", "U": "N KN ON", "D": "K O"}[op].split(), f"rows {marks}")
            self._rows(op, oid, told, tuples)
        except Refused as error:
            self.torn = self.torn or error
        except Unusable:
            self.unusable.add(oid)

    def _rows(self, op: str, oid: int, told: Told, tuples: Mapping[str, dict[str, Value]]) -> None:
        spec = self.specs[oid]
        new, old = tuples.get("N"), tuples.get("K", tuples.get("O"))
        key = list(told.key)
        if told.identity == "f":
            key = list(spec.key_columns)
            if not set(key) <= set(told.names):
                key = []
        if old is not None and new is not None:
            for name, value in new.items():
                if value is UNCHANGED and isinstance(old[name], bytes):
                    new[name] = old[name]
        whole = [values for values in (old, new if op == "I" else None) if values is not None]
        if any(value is UNCHANGED for values in whole for value in values.values()):
            raise Unusable
        if any(not isinstance(v[n], bytes) for v in tuples.values() for n in key):
            raise Unusable
        if not key and op != "I" and "O" not in tuples:
            raise Unusable

        def kept(values: Mapping[str, Value], only: Sequence[str] | None = None) -> dict[str, Any]:
            return {
                n: _text(v)
                for n, v in values.items()
                if n not in spec.excluded and (only is None or n in only) and v is not UNCHANGED
            }

        if op == "I":
            assert new is not None
            self._add(oid, "I", kept(new), None)
            return
        if op == "D":
            assert old is not None
            self._add(oid, "D", kept(old, key or None), None)
            return
        assert new is not None
        unchanged = [n for n, v in new.items() if v is UNCHANGED and n not in spec.excluded]
        if old is not None and not key:
            self._add(oid, "D", kept(old), None)
            self._add(oid, "I", kept(new), tuple(unchanged) or None)
            return
        data = kept(new)
        if old is not None and any(old[name] != new[name] for name in key):
            self._add(oid, "D", kept(old, key), None)
            if unchanged:
                data[""] = kept(old, key)
        self._add(oid, "U", data, tuple(unchanged) or None)

    def _add(
        self, oid: int, op: str, data: dict[str, Any], unchanged: tuple[str, ...] | None
    ) -> None:
        if oid not in self.specs:
            return
        assert self.transaction is not None
        self.transaction.append(
            Row(oid, op, self.lsn, self.commit_lsn, self.at, self.xid, unchanged, data)
        )


def _tuple(body: _Reader, columns: int) -> list[Value]:
    _must(body.number(2) == columns, "another number of columns")
    values = list[Value]()
    for _ in range(columns):
        kind = body.take(1)
        _must(kind in (b"n", b"u", b"t"), f"a column of kind {kind!r}")
        found: Value = None if kind == b"n" else UNCHANGED
        values.append(body.take(body.number(4)) if kind == b"t" else found)
    return values


def _text(value: Value) -> str | None:
    if value is None:
        return None
    assert isinstance(value, bytes)
    return value.decode("utf-8", "replace")
