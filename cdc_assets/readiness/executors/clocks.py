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

# From a relation that Spark reads while it plans: any other has a task, which waits for a slot.
_NOW = "select unix_micros(current_timestamp()) from values (1)"


def refuse_clocks_apart(session: SparkSession) -> None:
    """Raise NotReady if what a copy lands would be dated too far off."""
    refuse(clock_findings(session))


def clock_findings(session: SparkSession) -> Iterator[Finding]:
    """Whether this machine's clock is too far off the Spark Connect server's.

    The server looks at its own at some moment of the statement, of which nobody knows when.
    """
    before = time.time()
    row = session.sql(_NOW).first()
    after = time.time()
    assert row is not None
    there = float(row[0]) / 10**6
    if max(before - there, there - after) > MOST_APART_SECONDS:
        ahead = (before + after) / 2 - there
        how = "ahead of" if ahead > 0 else "behind"
        yield Finding(
            "lake_clock",
            "error",
            f"the clock of this machine is {abs(ahead):.0f} s {how} the Spark Connect"
            " server's: both date snapshots of the lake, and Iceberg refuses what is dated more"
            " than a minute before a table's last one.",
            "Have all machines synchronize their clocks (chrony, NTP).",
        )
