"""Where a benchmark runs: a Postgres that is kept with its data, and a home that is not."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.process.lifeline import acquire


@contextmanager
def workplace(
    cache: Path, say: Callable[[str], None], **settings: str
) -> Iterator[EmbeddedPostgres]:
    """The kept Postgres, for one benchmark at a time, and a home that is removed afterwards.

    ``settings``: of the server, beside ours.
    """
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        say(f"using {cache}; if another run does, this one waits")
        acquire(lock, threading.Event())
        for left in cache.glob("bench-*"):  # of a run that was killed
            shutil.rmtree(left)
        with tempfile.TemporaryDirectory(prefix="bench-", dir=cache) as folder:
            os.environ["CDC_ASSETS_HOME"] = folder  # so the Spark server is nobody else's
            # With the default of 1 GB a load at scale 1 would be checkpoints all along.
            settings = {"max_wal_size": "4GB", **settings}
            with EmbeddedPostgres(cache / "postgres", settings=settings) as postgres:
                yield postgres
