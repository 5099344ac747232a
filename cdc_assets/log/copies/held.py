"""What tables were like at the LSNs that dumps were taken at (``cdc-assets pin --hold``).

A restored dump knows nothing of the table's publication, nor of its files at the source.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from cdc_assets.log.heaps.record import HeapFile
from cdc_assets.log.store import LogStore
from cdc_assets.log.table_row import TableRow
from cdc_assets.postgres.lsn import Lsn


@dataclass(frozen=True, slots=True)
class HeldTable:
    """A table under the snapshot; ``horizon``: an xid below which all had ended by then.

    ``filled``: how many of its heaps are known to have rows.
    """

    published_as: str | None
    row_filter: str | None
    files: Mapping[int, HeapFile]
    horizon: int
    filled: int


def _definition(row: TableRow) -> str:
    """What it has to be still when it is copied: the log goes on from there."""
    columns = [[c.name, c.type, c.number] for c in row.columns]
    return json.dumps([row.oid, list(row.key_columns), columns])


def remember_held(store: LogStore, lsn: Lsn, row: TableRow, held: HeldTable) -> None:
    """Write down what the table was like at ``lsn``."""
    facts = {
        "definition": _definition(row),
        "published_as": held.published_as,
        "row_filter": held.row_filter,
        "files": {str(oid): list(file) for oid, file in held.files.items()},
        "horizon": held.horizon,
        "filled": held.filled,
    }
    store.connection.execute(
        "insert into held_tables (source, lsn, table_name, epoch, facts)"
        " values (%s, %s, %s, %s, %s)"
        " on conflict (source, lsn, table_name) do update"
        " set epoch = excluded.epoch, facts = excluded.facts",
        (store.source, str(lsn), str(row.table), row.epoch, json.dumps(facts)),
    )


def held_table(store: LogStore, lsn: Lsn, row: TableRow) -> HeldTable | None:
    """The same; None if nothing is known of it then, or it was defined otherwise."""
    found = store.connection.execute(
        "select facts from held_tables"
        " where source = %s and lsn = %s and table_name = %s and epoch = %s",
        (store.source, str(lsn), str(row.table), row.epoch),
    ).fetchone()
    if found is None or found[0]["definition"] != _definition(row):
        return None
    facts = found[0]
    files = {int(oid): HeapFile(*file) for oid, file in facts["files"].items()}
    return HeldTable(
        facts["published_as"],
        facts["row_filter"],
        files,
        int(facts["horizon"]),
        int(facts.get("filled", 0)),  # an earlier version didn't look
    )


def held_lsns(store: LogStore) -> list[Lsn]:
    """The LSNs, the newest first."""
    rows = store.connection.execute(
        "select distinct lsn from held_tables where source = %s order by 1 desc", (store.source,)
    ).fetchall()
    return [Lsn.parse(str(lsn)) for (lsn,) in rows]
