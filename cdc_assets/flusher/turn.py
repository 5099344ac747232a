"""Whose turn it is to flush.

The lock decides, and ``log.heart`` ends the sessions of one that hangs.

Why a late one can do no harm (invariants 1 and 2): it registers in the very session that held the
lock. That session is gone, so nothing of it can be registered, and what isn't registered is never
acknowledged. It notices, and waits in line. Its walsender ends by ``wal_sender_timeout``; there is
one, ``stream`` sees to that.
"""

from __future__ import annotations

from cdc_assets.log.heart import STALE_SECONDS
from cdc_assets.log.store import LogStore


def active_process(store: LogStore) -> tuple[str, bool] | None:
    """The process that has the turn, and whether it wasn't heard of for too long."""
    holder = store.lock_holder(f"flusher:{store.source}")
    if holder is None:
        return None
    row = store.connection.execute(
        "select process, heartbeat_at < clock_timestamp() - make_interval(secs => %s)"
        " from sessions where source = %s and pid = %s",
        (STALE_SECONDS, store.source, holder),
    ).fetchone()
    return (str(row[0]), bool(row[1])) if row else (f"session {holder}", False)
