"""A plain pgoutput decoder, frame by frame, and an encoder: the decoder's tests trust them.

Written from the protocol's documentation, slow and obvious on purpose; shares no code with the
columnar one.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

UNCHANGED = object()
Value = str | bytes | None | object


@dataclass(frozen=True, slots=True)
class Spec:
    """How a relation is to be staged."""

    key_columns: tuple[str, ...]
    excluded: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Row:
    """A staged row; ``data`` is the parsed object, its empty-named member parsed too."""

    oid: int
    op: str
    lsn: int
    commit_lsn: int
    at: datetime
    xid: int
    unchanged: tuple[str, ...] | None
    data: Mapping[str, Any]


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


class Reference:
    """Decodes frame by frame; ``rows`` are all of the committed transactions."""

    def __init__(self, specs: Mapping[int, Spec]) -> None:
        self.specs = specs
        self.relations: dict[int, list[str]] = {}
        self.rows: list[Row] = []
        self.transaction: list[Row] | None = None
        self.position = 0

    def feed(self, frame: bytes) -> None:
        if frame[:1] == b"k":
            if self.transaction is None:
                self.position = max(self.position, struct.unpack_from(">Q", frame, 1)[0])
            return
        (self.lsn,) = struct.unpack_from(">Q", frame, 1)
        message = frame[25:]
        kind, body = message[:1], message[1:]
        if kind == b"B":
            self.commit_lsn, at, self.xid = struct.unpack(">QqI", body)
            self.at = datetime(2000, 1, 1, tzinfo=UTC) + timedelta(microseconds=at)
            self.transaction = []
        elif kind == b"C":
            assert self.transaction is not None
            self.rows += self.transaction
            self.transaction = None
            self.position = max(self.position, struct.unpack_from(">Q", body, 9)[0])
        elif kind == b"R":
            self._relation(body)
        elif kind == b"T":
            (count,) = struct.unpack_from(">I", body)
            for oid in struct.unpack_from(f">{count}I", body, 5):
                self._add(oid, "T", {}, None)
        elif kind in (b"I", b"U", b"D"):
            self._change(kind.decode(), body)

    def _relation(self, body: bytes) -> None:
        (oid,) = struct.unpack_from(">I", body)
        _, _, rest = body[4:].split(b"\0", 2)
        (count,) = struct.unpack_from(">H", rest, 1)
        at, names = 3, []
        for _ in range(count):
            end = rest.index(b"\0", at + 1)
            names.append(rest[at + 1 : end].decode())
            at = end + 9
        self.relations[oid] = names

    def _change(self, op: str, body: bytes) -> None:
        (oid,) = struct.unpack_from(">I", body)
        if oid not in self.specs:
            return
        names, spec, at = self.relations[oid], self.specs[oid], 4
        tuples: dict[str, dict[str, Value]] = {}
        while at < len(body):
            mark = body[at : at + 1].decode()
            values, at = self._tuple(body, at + 1)
            tuples[mark] = dict(zip(names, values, strict=True))
        new, old = tuples.get("N"), tuples.get("K", tuples.get("O"))
        key = [name for name in spec.key_columns if name in names]

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
        if old is not None:
            for name, value in new.items():
                if value is UNCHANGED and old[name] is not None:
                    new[name] = old[name]
        unchanged = [n for n, v in new.items() if v is UNCHANGED and n not in spec.excluded]
        if old is not None and not key:
            self._add(oid, "D", kept(old), None)
            self._add(oid, "I", kept(new), None)
            return
        data = kept(new)
        if old is not None and any(old[name] != new[name] for name in key):
            self._add(oid, "D", kept(old, key), None)
            if unchanged:
                data[""] = kept(old, key)
        self._add(oid, "U", data, tuple(unchanged) or None)

    @staticmethod
    def _tuple(body: bytes, at: int) -> tuple[list[Value], int]:
        (count,) = struct.unpack_from(">H", body, at)
        at, values = at + 2, list[Value]()
        for _ in range(count):
            kind = body[at : at + 1]
            at += 1
            if kind == b"n":
                values.append(None)
            elif kind == b"u":
                values.append(UNCHANGED)
            else:
                (size,) = struct.unpack_from(">I", body, at)
                values.append(body[at + 4 : at + 4 + size])
                at += 4 + size
        return values, at

    def _add(
        self, oid: int, op: str, data: dict[str, Any], unchanged: tuple[str, ...] | None
    ) -> None:
        if oid not in self.specs:
            return
        assert self.transaction is not None
        self.transaction.append(
            Row(oid, op, self.lsn, self.commit_lsn, self.at, self.xid, unchanged, data)
        )


def _text(value: Value) -> str | None:
    if value is None:
        return None
    assert isinstance(value, bytes)
    return value.decode("utf-8", "replace")


def parse_staged(oid: int, rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Rows of a staged file as Python has them (``Table.to_pylist``)."""
    parsed = []
    for row in rows:
        data = json.loads(row["_data"])
        if "" in data:
            data[""] = json.loads(data[""])
        unchanged = row["_unchanged_cols"]
        parsed.append(
            Row(
                oid,
                row["_op"],
                row["_lsn"],
                row["_commit_lsn"],
                row["_ts"],
                row["_xid"],
                None if unchanged is None else tuple(json.loads(unchanged)),
                data,
            )
        )
    return parsed
