"""A second slot beside the flusher's: what the server sent, and what the plain decoder makes of it.

The flusher's log of a table has to equal it, row by row.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

from cdc_assets.postgres.lsn import Lsn
from cdc_assets_tests.support.flusher import Bench
from cdc_assets_tests.support.pgoutput_reference import Reference, Spec
from cdc_assets_tests.support.staged_rows import Row

BESIDE = "beside"


def open_beside(source: Bench) -> None:
    """From here on; after the publication was made. Slots are the cluster's, so is the name."""
    source.execute(
        "select pg_create_logical_replication_slot(%s, 'pgoutput')", f"{BESIDE}_{source.name}"
    )


def frames(source: Bench, **options: str) -> list[bytes]:
    """XLogData frames of all that committed; the slot stays where it is."""
    given = {"proto_version": "1", "publication_names": f'"cdc_{source.name}"', **options}
    listed = [text for pair in given.items() for text in pair]
    rows = source.execute(
        "select lsn::text, data from pg_logical_slot_peek_binary_changes(%s, null, null,"
        " variadic %s)",
        f"{BESIDE}_{source.name}",
        listed,
    )
    return [
        b"w" + struct.pack(">QQq", int(Lsn.parse(lsn)), 0, 0) + bytes(data) for lsn, data in rows
    ]


def kinds(sent: Sequence[bytes]) -> set[str]:
    return {chr(frame[25]) for frame in sent}


def oid(source: Bench, table: str) -> int:
    return int(source.execute("select %s::regclass::oid::bigint", table)[0][0])


def expected(sent: Sequence[bytes], specs: Mapping[int, Spec]) -> dict[int, list[tuple[Any, ...]]]:
    plain = Reference(specs)
    for frame in sent:
        plain.feed(frame)
    assert plain.transaction is None
    found: dict[int, list[tuple[Any, ...]]] = {number: [] for number in specs}
    for row in plain.rows:
        found[row.oid].append(comparable(row))
    return found


def comparable(row: Row) -> tuple[Any, ...]:
    return (row.op, row.lsn, row.commit_lsn, row.at, row.xid, row.unchanged, dict(row.data))


def assert_log_is_what_was_sent(
    source: Bench, keys: Mapping[str, tuple[str, ...]], sent: Sequence[bytes]
) -> int:
    """``keys``: the key columns of each table. Returns how many rows were compared."""
    oids = {table: oid(source, table) for table in keys}
    wanted = expected(sent, {oids[table]: Spec(key) for table, key in keys.items()})
    for table, number in oids.items():
        found = [comparable(row) for row in source.log(table)]
        assert found == wanted[number], table
    return sum(map(len, wanted.values()))
