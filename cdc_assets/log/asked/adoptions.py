"""Tables whose lake table was there before, and is taken over without a copy (``tables[].adopt``).

A fact of ``pipeline_meta`` for each, of one epoch: another one is copied as ever.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum

from cdc_assets.log.store import LogStore
from cdc_assets.log.table_row import TableRow
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId

# Key in pipeline_meta, followed by the table.
ADOPTED = "adopted:"


class Adopted(StrEnum):
    """``awaited``: its log has begun. ``unverified``: nobody has compared its rows since."""

    AWAITED = "awaited"
    UNVERIFIED = "unverified"
    VERIFIED = "verified"


@dataclass(frozen=True, slots=True)
class Adoption:
    """``begin``: whatever commits from that LSN on is in the table's log."""

    state: Adopted
    epoch: int
    begin: Lsn

    @property
    def id(self) -> str:
        """No other adoption's, even in a coordination schema made anew."""
        return f"{self.epoch}:{self.begin}"


def await_adoption(store: LogStore, row: TableRow, begin: Lsn) -> None:
    """Record that the table's log begins, within the transaction of its pin."""
    fact = {"state": Adopted.AWAITED, "epoch": row.epoch, "begin": str(begin)}
    store.set_meta(f"{ADOPTED}{row.table}", json.dumps(fact))
    # Only such tables, and those that are copied from elsewhere, have one: others aren't asked for.
    store.connection.execute(
        "update tables set log_from = %s where source = %s and table_name = %s and epoch = %s",
        (str(begin), store.source, str(row.table), row.epoch),
    )


def adoption(store: LogStore, row: TableRow) -> Adoption | None:
    """That of the table's epoch; None if it is, or was, copied, or begins with the stream alone."""
    if row.log_from is None or (text := store.meta(f"{ADOPTED}{row.table}")) is None:
        return None
    fact = json.loads(text)
    found = Adoption(Adopted(fact["state"]), int(fact["epoch"]), Lsn.parse(fact["begin"]))
    return found if found.epoch == row.epoch else None


def begin_at(store: LogStore, row: TableRow, lsn: Lsn) -> None:
    """What committed below ``lsn`` is in the lake table: the log is applied from there on."""
    store.connection.execute(
        "update tables set snapshot_lsn = %(lsn)s, complete_lsn = %(lsn)s, updated_at = now()"
        " where source = %(source)s and table_name = %(table)s and epoch = %(epoch)s",
        {
            "lsn": str(lsn),
            "source": store.source,
            "table": str(row.table),
            "epoch": row.epoch,
        },
    )


def note_adopted(store: LogStore, row: TableRow) -> None:
    _move(store, row.table, Adopted.AWAITED, Adopted.UNVERIFIED)


def note_verified(store: LogStore, table: TableId) -> None:
    """All rows of the table were compared and equal; nothing for one that wasn't adopted."""
    _move(store, table, Adopted.UNVERIFIED, Adopted.VERIFIED)


def _move(store: LogStore, table: TableId, before: Adopted, after: Adopted) -> None:
    store.connection.execute(
        "update pipeline_meta set value = (value::jsonb || pg_catalog.jsonb_build_object"
        "('state', %s::text))::text where source = %s and key = %s"
        " and value::jsonb ->> 'state' = %s",
        (after, store.source, f"{ADOPTED}{table}", before),
    )
