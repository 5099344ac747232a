"""How far a source that is a hot standby has followed its primary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import LiteralString

from cdc_assets.postgres.session.connect import Connection
from cdc_assets.postgres.slots import RECEIVED, on_standby

_REPLAY: LiteralString = f"""
select pg_catalog.pg_wal_lsn_diff({RECEIVED}, pg_catalog.pg_last_wal_replay_lsn())::bigint,
       case when {RECEIVED} > pg_catalog.pg_last_wal_replay_lsn()
            then extract(epoch from pg_catalog.clock_timestamp()
                                    - pg_catalog.pg_last_xact_replay_timestamp()) end::float8,
       pg_catalog.pg_is_wal_replay_paused(),
       exists (select from pg_catalog.pg_stat_wal_receiver)
"""


@dataclass(frozen=True, slots=True)
class ReplayStatus:
    """What the standby has received and not replayed: nothing of it is streamed yet.

    ``behind_seconds``: since the commit that it replayed last; None if it has replayed everything.
    ``connected``: whether it receives from its primary; it knows of nothing newer otherwise.
    """

    behind_bytes: int
    behind_seconds: float | None
    paused: bool
    connected: bool

    def __str__(self) -> str:
        if self.paused:
            said = "replay paused"
        else:
            said = "replaying" if self.connected else "not connected to its primary"
        seconds = f", {self.behind_seconds:.0f} s" if self.behind_seconds is not None else ""
        return f"{said}, {self.behind_bytes / 1e6:,.1f} MB{seconds} behind what it received"


def replay_status(source: Connection) -> ReplayStatus | None:
    """None of a primary."""
    if not on_standby(source):
        return None
    row = source.execute(_REPLAY).fetchone()
    assert row is not None
    return ReplayStatus(*row)
