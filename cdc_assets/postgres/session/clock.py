"""How far another machine's clock is from this one's."""

from __future__ import annotations

import time

from cdc_assets.postgres.session.connect import Connection


def ahead_seconds(connection: Connection) -> float:
    """Seconds that the server's clock is ahead of this machine's."""
    before = time.time()
    row = connection.execute("select extract(epoch from clock_timestamp())::float8").fetchone()
    after = time.time()
    assert row is not None
    return float(row[0]) - (before + after) / 2
