"""Markers: rows of a published table, each of which makes a mark where its transaction committed.

They are registered in the transaction that registers the files of that commit and of all before it,
and of none after it (``flusher.decode.markers``). So each deployment of the source, whatever its
settings, cuts at the same commit, and once, as it moves ``flushed_lsn`` there once. A marker that
can't be a mark is recorded with the reason: nothing that a row says stops the stream.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from cdc_assets.errors import ConfigurationError, first_line
from cdc_assets.log.asked.marks import make, refuse_name
from cdc_assets.log.store import LogStore
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId

logger = logging.getLogger(__name__)

# How long it is known what became of a marker, and how much is kept of its texts.
KEPT_DAYS, _LONGEST = 90, 200


@dataclass(frozen=True, slots=True)
class Refused:
    """A marker of which no mark was made, and why."""

    marker: str
    name: str
    lsn: Lsn
    at: datetime
    reason: str


def take_markers(
    store: LogStore,
    at: Lsn,
    markers: Sequence[tuple[str, str]],
    tables: Sequence[TableId],
    *,
    most: int,
) -> None:
    """Make the marks that ``markers`` (their ids and names) ask for, in the caller's transaction.

    ``at``: the end of their transaction's commit, where ``flushed_lsn`` is. So many of one
    transaction as ``most`` are taken.
    """
    for number, (marker, name) in enumerate(markers):
        refused = None
        try:
            if number >= most:
                raise ConfigurationError(f"its transaction has more than {most} of them.")
            refuse_name(name)
            make(store, name, tables)
        except ConfigurationError as problem:
            refused = first_line(problem)
            logger.warning("the marker %s makes no mark: %s", _plain(marker), refused)
        store.connection.execute(
            "insert into markers (source, lsn, number, marker, name, refused)"
            " values (%s, %s, %s, %s, %s, %s) on conflict do nothing",
            (store.source, str(at), number, _plain(marker), _plain(name), refused),
        )
    store.connection.execute(
        "delete from markers where source = %s"
        " and received_at < clock_timestamp() - make_interval(days => %s)",
        (store.source, KEPT_DAYS),
    )


def refused_markers(store: LogStore) -> list[Refused]:
    """The markers of the last ``KEPT_DAYS`` of which no mark was made, the oldest first."""
    rows = store.connection.execute(
        "select marker, name, lsn, received_at, refused from markers"
        " where source = %s and refused is not null order by lsn, number",
        (store.source,),
    ).fetchall()
    return [Refused(marker, name, Lsn.parse(lsn), at, why) for marker, name, lsn, at, why in rows]


def outcome(store: LogStore, marker: str) -> tuple[bool, str | None]:
    """Whether the marker was received, and why it made no mark if it made none."""
    row = store.connection.execute(
        "select refused from markers where source = %s and marker = %s order by lsn desc limit 1",
        (store.source, marker),
    ).fetchone()
    return row is not None, row[0] if row is not None else None


def _plain(text: str) -> str:
    """A text that the coordination database has characters for, whatever its encoding."""
    return text[:_LONGEST].encode("ascii", "backslashreplace").decode().replace("\0", "")
