"""``pg_recvlogical``, the peer of the flusher that comes with Postgres."""

from __future__ import annotations

import os
import resource
import subprocess
import time
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict

from cdc_assets.postgres.lsn import Lsn


def recvlogical(
    program: str, dsn: str, slot: str, until: Lsn, file: Path, publication: str = "cdc_bench"
) -> tuple[float, float]:
    """Read from the slot's position to ``until`` into ``file``, which is removed.

    Returns seconds, of the clock and of the processor.
    """
    given = {k: str(v) for k, v in conninfo_to_dict(dsn).items()}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [
            program, "--start", "--slot", slot, "--file", str(file), "--endpos", str(until),
            "--option", "proto_version=1", "--option", f"publication_names={publication}",
            "--no-loop", "--host", given["host"], "--port", given["port"],
            "--username", given["user"], "--dbname", given["dbname"],
        ],
        check=True,
        env={
            **os.environ,
            "PGPASSWORD": given.get("password", ""),
            "PGSSLMODE": given.get("sslmode", "disable"),
        },
    )  # fmt: skip
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    file.unlink()
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
