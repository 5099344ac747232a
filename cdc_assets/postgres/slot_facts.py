"""A replication slot as a danger to its source: what it keeps, and how much longer it can."""

from __future__ import annotations

from dataclasses import dataclass

import psycopg
from psycopg import sql

# Postgres 17 notes since when nobody reads from a slot.
_INACTIVE_SINCE = 170000


@dataclass(frozen=True, slots=True)
class SlotFacts:
    """The slot as a danger to its source. Bytes, seconds, transactions.

    ``safe_bytes``: what may still be written before the slot loses WAL; None without
    ``max_slot_wal_keep_size`` (``keep_bytes``).
    """

    active: bool
    wal_status: str | None
    retained_bytes: int
    safe_bytes: int | None = None
    keep_bytes: int | None = None
    inactive_seconds: float | None = None
    xmin_age: int | None = None


def slot_facts(source: psycopg.Connection[tuple[object, ...]], name: str) -> SlotFacts | None:
    """See :class:`SlotFacts`; None if there is no slot of that name."""
    inactive = "null::float8"
    if source.info.server_version >= _INACTIVE_SINCE:
        inactive = "extract(epoch from clock_timestamp() - inactive_since)::float8"
    row = source.execute(
        sql.SQL(
            "select active, wal_status, coalesce(pg_wal_lsn_diff(case when pg_is_in_recovery()"
            " then pg_last_wal_replay_lsn() else pg_current_wal_lsn() end, restart_lsn), 0)"
            "::bigint,"
            " safe_wal_size::bigint,"
            " (select case when setting::bigint >= 0 then setting::bigint * 1024 * 1024 end"
            "  from pg_catalog.pg_settings where name = 'max_slot_wal_keep_size'),"
            " {}, age(catalog_xmin)::bigint"
            " from pg_catalog.pg_replication_slots where slot_name = %s"
        ).format(sql.SQL(inactive)),
        (name,),
    ).fetchone()
    return None if row is None else SlotFacts(*row)  # type: ignore[arg-type]
