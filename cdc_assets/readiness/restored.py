"""What is said of a restored dump that first copies are read from (``kind: dump``)."""

from __future__ import annotations

from cdc_assets.messages.findings import Finding
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId


def awaited(table: TableId) -> Finding:
    """Nobody has told of one yet."""
    return Finding(
        "dump_awaited",
        "warning",
        f"{table}: it waits for a dump, as snapshot.from has no dsn and lsn yet.",
        "cdc-assets pin --hold names a snapshot and its LSN: pg_dump --snapshot=… --table=…;"
        " restore it, and give that database and the LSN in snapshot.from.",
        str(table),
    )


def unknown_lsn(table: TableId, lsn: Lsn) -> Finding:
    """The LSN isn't that of a snapshot of ours, or the table is another one by now."""
    return Finding(
        "dump_unknown_lsn",
        "error",
        f"{table}: {lsn} isn't the LSN of a snapshot that was held for a dump of this table, as it"
        " is defined now.",
        "Give the LSN that cdc-assets pin --hold named; or hold another one, and dump again.",
        str(table),
    )


def other_restored(table: TableId) -> Finding:
    """The restored table hasn't the source's columns, all of its partitions, or any rows."""
    return Finding(
        "dump_other_table",
        "error",
        f"{table}: the database of snapshot.from doesn't have it with the source's columns, as many"
        " partitions, and rows where the source had some; or it is locked there.",
        "Restore the whole dump of it, with its types, under its own name; it is copied once that"
        " has ended. pg_dump --table=… has no partition that isn't named, too.",
        str(table),
    )


def other_collation(table: TableId) -> Finding:
    """Its row filter may leave other rows there than those that the source streams."""
    return Finding(
        "dump_other_collation",
        "error",
        f"{table}: its filter (where) depends on the order or case of text, for which the database"
        " of snapshot.from has another locale, encoding or version of it than the source.",
        "Restore it into a database that was made with the source's locale and encoding, on the"
        " same system; or have where compare by a collation that is the same everywhere: v collate"
        """ "C" > 'Z'.""",
        str(table),
    )
