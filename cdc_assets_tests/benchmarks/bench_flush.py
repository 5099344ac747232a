"""``python -m cdc_assets_tests.benchmarks.bench_flush``: our flusher against pg_recvlogical.

The same backlog (one pgbench-like table of six columns, committed in transactions of 100 changes)
is read by turns: by ``pg_recvlogical`` into nothing, and by the flusher, staging and registering.
Each reader has its own slot, copied from one that stands before the backlog. Prints one JSON line;
the ratio is of medians: the flusher's time over pg_recvlogical's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import psutil
import psycopg
from psycopg.conninfo import conninfo_to_dict

from cdc_assets.config import parse_config
from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.flusher import main as flusher
from cdc_assets.flusher.receiver import Progress, Session
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.admission import admit
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.replication import current_lsn

TABLE = """
    create table history
        (id bigint primary key, tid int, bid int, aid int, delta int, mtime timestamp)
"""


def _backlog(connection: psycopg.Connection[tuple[object, ...]], changes: int) -> None:
    connection.execute("""
        create procedure fill(changes int) language plpgsql as $$
        begin
            for batch in 0 .. changes / 100 - 1 loop
                insert into history
                select batch * 100 + g, g % 10, g % 7, (random() * 1e6)::int, (random() * 1e4)::int,
                    clock_timestamp()
                from generate_series(1, 100) g;
                commit;
            end loop;
        end $$
    """)
    connection.execute("call fill(%s)", (changes,))


def _recvlogical(postgres: EmbeddedPostgres, dsn: str, slot: str, end: Lsn) -> float:
    given = {k: str(v) for k, v in conninfo_to_dict(dsn).items()}
    began = time.perf_counter()
    subprocess.run(
        [
            postgres.program("pg_recvlogical"), "--start", "--slot", slot, "--file", "/dev/null",
            "--endpos", str(end), "--option", "proto_version=1",
            "--option", "publication_names=cdc_bench", "--no-loop", "--fsync-interval", "0",
            "--host", given["host"], "--port", given["port"], "--username", given["user"],
            "--dbname", given["dbname"],
        ],
        check=True,
        env={**os.environ, "PGPASSWORD": given.get("password", "")},
    )  # fmt: skip
    return time.perf_counter() - began


class _Watch:
    """Samples the CPU time of the decoder while a session runs."""

    def __init__(self, progress: Progress) -> None:
        self.decoder_seconds = 0.0
        self._progress, self._over = progress, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(0.05):
            if self._progress.decoder_pid is None:
                continue
            try:
                times = psutil.Process(self._progress.decoder_pid).cpu_times()
            except psutil.NoSuchProcess:
                continue
            self.decoder_seconds = max(self.decoder_seconds, times.user + times.system)

    def close(self) -> float:
        self._over.set()
        self._thread.join()
        return self.decoder_seconds


def _flush(pipeline: Pipeline, start: Lsn, end: Lsn) -> tuple[float, float, float, int]:
    """Wall seconds, CPU seconds of the receiver and of the decoder, rows."""
    progress = Progress()
    watch = _Watch(progress)
    cpu, began = time.process_time(), time.perf_counter()
    Session(pipeline, start, progress, stop=threading.Event(), until=end).run()
    wall, receiver = time.perf_counter() - began, time.process_time() - cpu
    return wall, receiver, watch.close(), progress.rows


def measure(changes: int, rounds: int, folder: Path) -> dict[str, object]:
    with EmbeddedPostgres(folder / "postgres", settings={"fsync": "off"}) as postgres:
        dsn = postgres.dsn()
        assert dsn is not None
        theirs, ours = list[float](), list[tuple[float, float, float, int]]()
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(TABLE.encode())
            settings = {
                "name": "bench",
                "postgres": {"dsn": dsn},
                "tables": [{"name": "public.history"}],
                "staging": {"uri": (folder / "staging").as_uri()},
                "snapshot": {"mode": "never"},
            }
            flusher.run(parse_config(settings, "bench"), until=current_lsn(connection))
            _backlog(connection, changes)
            end = current_lsn(connection)
            for number in range(rounds):
                for name in (f"theirs_{number}", f"ours_{number}"):
                    connection.execute(
                        "select pg_copy_logical_replication_slot('cdc_bench', %s)", (name,)
                    )
                theirs.append(_recvlogical(postgres, dsn, f"theirs_{number}", end))
                config = parse_config(
                    settings | {"slot": f"ours_{number}", "publication": "cdc_bench"}, ""
                )
                with Pipeline.open(config) as pipeline:
                    start = admit(pipeline)
                    ours.append(_flush(pipeline, start, end))
                    pipeline.store.connection.execute(
                        "update flushed_lsn set lsn = %s", (str(start),)
                    )
                for name in (f"theirs_{number}", f"ours_{number}"):
                    connection.execute("select pg_drop_replication_slot(%s)", (name,))
    assert all(rows == changes for _, _, _, rows in ours), ours
    wall = statistics.median(seconds for seconds, *_ in ours)
    base = statistics.median(theirs)
    return {
        "changes": changes,
        "rounds": rounds,
        "pg_recvlogical_seconds": [round(s, 2) for s in theirs],
        "flusher_seconds": [round(s, 2) for s, *_ in ours],
        "ratio": round(wall / base, 3),
        "changes_per_second": round(changes / wall),
        "receiver_cpu_us_per_change": round(
            statistics.median(cpu for _, cpu, _, _ in ours) / changes * 1e6, 2
        ),
        "decoder_cpu_us_per_change": round(
            statistics.median(cpu for _, _, cpu, _ in ours) / changes * 1e6, 2
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--changes", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench_flush-") as folder:
        Path(folder).chmod(0o755)
        print(json.dumps(measure(options.changes, options.rounds, Path(folder))))  # noqa: T201


if __name__ == "__main__":
    main()
