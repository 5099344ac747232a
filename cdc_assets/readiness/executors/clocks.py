"""The clocks that date a lake table's snapshots: this machine's for copies, Spark's for merges.

Iceberg refuses a commit through Spark that is dated more than a minute before the last one, so what
is copied here has to be dated by about the clock of the Spark that goes on with it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from pyspark.sql import SparkSession

from cdc_assets.lake.copies import MOST_APART_SECONDS
from cdc_assets.messages.findings import Finding
from cdc_assets.readiness.flushing import refuse


def refuse_clocks_apart(session: SparkSession) -> None:
    """Raise NotReady if what a copy lands would be dated too far off."""
    refuse(clock_findings(session))


def clock_findings(session: SparkSession) -> Iterator[Finding]:
    """Whether this machine's clock is too far off the Spark Connect server's."""
    before = time.time()
    row = session.sql("select unix_micros(current_timestamp())").first()
    after = time.time()
    assert row is not None
    ahead = (before + after) / 2 - float(row[0]) / 10**6
    if abs(ahead) > MOST_APART_SECONDS:
        how = "ahead of" if ahead > 0 else "behind"
        yield Finding(
            "lake_clock",
            "error",
            f"the clock of this machine is {abs(ahead):.0f} s {how} the Spark Connect"
            " server's: both date snapshots of the lake, and Iceberg refuses what is dated more"
            " than a minute before a table's last one.",
            "Have all machines synchronize their clocks (chrony, NTP).",
        )
