"""A worker that stops itself (SIGSTOP) when it passes a named step of a merge for the first time.

``python -m cdc_assets_tests.faults.stops_at STEP --config FILE`` is ``materialize --follow``
otherwise, with heartbeats that go stale sooner. STEP is one of STEPS, or ``nowhere``.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from pyspark.sql.connect.readwriter import DataFrameWriterV2
from pyspark.sql.connect.session import SparkSession

from cdc_assets.cli.main import cli
from cdc_assets.lake import publish
from cdc_assets.lake.catalog.parsed import ParsedOnce
from cdc_assets.lake.drafts.tables import TableDraft
from cdc_assets.log.sessions import heartbeat, workers
from cdc_assets.log.store import LogStore

STALE_SECONDS = 6.0


def _around(owner: Any, name: str, passes: Callable[..., bool], *, first: bool) -> None:
    real, left = getattr(owner, name), [1]

    def wrapped(*args: Any, **options: Any) -> Any:
        counts = left[0] > 0 and passes(*args)
        left[0] -= counts
        if counts and first:
            os.kill(os.getpid(), signal.SIGSTOP)
        result = real(*args, **options)
        if counts and not first:
            os.kill(os.getpid(), signal.SIGSTOP)
        return result

    setattr(owner, name, wrapped)


def _sql(word: str, *, first: bool) -> Callable[[], None]:
    return lambda: _around(SparkSession, "sql", lambda _, text, *a: word in text, first=first)


STEPS: dict[str, Callable[[], None]] = {
    "before the draft": lambda: _around(publish, "table_draft", lambda *_: True, first=True),
    "after the deletes": _sql("delete from", first=False),
    "before the append": lambda: _around(DataFrameWriterV2, "append", lambda *_: True, first=True),
    "before publishing": lambda: _around(TableDraft, "publish", lambda *_: True, first=True),
    "between file and catalog": lambda: _around(ParsedOnce, "lead", lambda *_: True, first=True),
    "after publishing": lambda: _around(ParsedOnce, "lead", lambda *_: True, first=False),
    "before the cursor": lambda: _around(LogStore, "set_cursor", lambda *_: True, first=True),
}


if __name__ == "__main__":
    for module in (heartbeat, workers):
        vars(module).update(STALE_SECONDS=STALE_SECONDS, HEARTBEAT_SECONDS=0.5)
    if sys.argv[1] in STEPS:
        STEPS[sys.argv[1]]()
    cli([*sys.argv[2:], "-v", "materialize", "--follow"])
