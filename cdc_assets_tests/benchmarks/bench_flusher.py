"""``python -m cdc_assets_tests.benchmarks.bench_flusher``: our flusher against pg_recvlogical.

The same backlog (60 % insert, 30 % update, 10 % delete, in transactions of 1,000 changes) waits in
identical slots, copies of one that stands before it. It is read by turns: by ``pg_recvlogical``
(pgoutput, protocol 1) into a file, and by a flusher, a process of its own that stages on local disk
and registers. Prints one JSON line. ``ratio`` is the flusher's changes a second over
``pg_recvlogical``'s, of medians; both are timed from the connection to the last acknowledgement,
so the start of the decoding process is in it, while the receiver's imports and its look at the
catalog stand beside it, in ``startup_seconds``. CPU is that of all processes of the flusher;
memory is the sum of their peaks (VmHWM), which counts shared pages more than once. Beside them
stands the CPU of ``pg_recvlogical`` with its walsender, and of the flusher's backends
(``source_cpu``); ``calibration`` is fixed work on this machine. ``tls``: read by both through TLS,
and without it, on Debian's Postgres 15. Progress is on stderr.

The cost a change is measured again for other numbers of tables, and for a smaller and a larger
backlog. ``further`` is what the changes that a larger backlog has more cost: without what is done
once for a session and for each table, like its start, a table's relation and its registration.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo
from rich.console import Console

from cdc_assets.config.source import parse_config
from cdc_assets.embedded.binaries import own, server_user
from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.flusher import flusher
from cdc_assets.flusher.progress import Progress
from cdc_assets.flusher.session import Session
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.slots import current_lsn
from cdc_assets.readiness.admission import admit
from cdc_assets_tests.benchmarks.calibration import (
    END_SECONDS,
    Calibration,
    calibrate,
    server_cpu_seconds,
)
from cdc_assets_tests.benchmarks.recvlogical import recvlogical
from cdc_assets_tests.support.peak_memory import PeakMemory
from cdc_assets_tests.support.tls import Authority

stderr = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)

PLAIN, TLS = "disable", "require"
# The bundled Postgres knows no TLS.
_DEBIANS_15 = Path("/usr/lib/postgresql/15/bin")
_SETTINGS = {"max_wal_size": "8GB"}
TRANSACTION_CHANGES = 1_000
# Of how many tables a transaction is, where there are so many.
TRANSACTION_TABLES = 100

_TABLE = """
    create table {} (
        id bigint primary key, quantity int, note text, price numeric(12, 2), at timestamptz,
        payload jsonb)
"""

# 60 % insert, 30 % update, 10 % delete; a text of 40 bytes, a JSON object of 60.
_FILL = """
    create procedure fill(transactions int, tables int, together int) language plpgsql as $$
    declare
        share int := 1000 / together;
        name text;
        base bigint;
    begin
        for number in 0 .. transactions - 1 loop
            for place in 0 .. together - 1 loop
                name := 't' || (number * together + place) % tables;
                base := number::bigint * 1000;
                execute format('insert into %I select $1 + g, g,'
                    ' md5(($1 + g)::text) || ''12345678'', mod(g * 37, 100000) / 100.0,'
                    ' clock_timestamp(), jsonb_build_object(''kind'', ''order'','
                    ' ''customer'', ''c'' || $1 + g, ''token'', left(md5((g - $1)::text), 16))'
                    ' from generate_series(1, $2 * 6 / 10) g', name) using base, share;
                execute format('update %I set quantity = quantity + 1, note = reverse(note)'
                    ' where id > $1 and id <= $1 + $2 * 3 / 10', name) using base, share;
                execute format('delete from %I'
                    ' where id > $1 + $2 * 3 / 10 and id <= $1 + $2 * 4 / 10', name)
                    using base, share;
            end loop;
            commit;
        end loop;
    end $$
"""


@dataclass(frozen=True, slots=True)
class Reading:
    """What one reader took for the whole backlog; sizes in bytes."""

    seconds: float
    rows: int = 0
    startup_seconds: float = 0.0
    receiver_cpu_seconds: float = 0.0
    decoder_cpu_seconds: float = 0.0
    peak_memory: int = 0
    source_cpu_seconds: float = 0.0

    @property
    def cpu_seconds(self) -> float:
        return self.receiver_cpu_seconds + self.decoder_cpu_seconds


def _flush(settings: dict[str, object], until: Lsn) -> Reading:
    """The flusher as a process of its own."""
    child = subprocess.Popen(
        [sys.executable, "-m", __spec__.name, "--flush", json.dumps(settings), str(until)],
        stdout=subprocess.PIPE,
        env={**os.environ, "CDC_ASSETS_LOG_LEVEL": os.environ.get("CDC_ASSETS_LOG_LEVEL", "ERROR")},
    )
    watch = PeakMemory(child.pid)
    said, _ = child.communicate()
    peak = sum(watch.close())
    if child.returncode:
        raise SystemExit(child.returncode)
    return Reading(**json.loads(said) | {"peak_memory": peak})


def _flush_here(settings: dict[str, object], until: Lsn) -> None:
    """What that process does; it prints its Reading."""
    config = parse_config(settings, "bench")
    progress = Progress()
    with Pipeline.open(config) as pipeline:
        start = admit(pipeline)
        startup = time.time() - psutil.Process().create_time()
        cpu, began = time.process_time(), time.perf_counter()
        Session(pipeline, start, progress, stop=threading.Event(), until=until).run()
        seconds, receiver = time.perf_counter() - began, time.process_time() - cpu
    decoder = resource.getrusage(resource.RUSAGE_CHILDREN)
    reading = Reading(
        seconds, progress.rows, startup, receiver, decoder.ru_utime + decoder.ru_stime
    )
    print(json.dumps(asdict(reading)))  # noqa: T201


@dataclass(frozen=True, slots=True)
class Backlog:
    """Changes that wait in the slot ``cdc_bench`` of a database of their own."""

    server: EmbeddedPostgres
    folder: Path
    dsn: str
    connection: psycopg.Connection[Any]
    changes: int
    settings: dict[str, object]
    start: Lsn
    end: Lsn

    @classmethod
    def make(cls, server: EmbeddedPostgres, folder: Path, changes: int, tables: int) -> Backlog:
        name = f"bench_{changes}_{tables}"
        with psycopg.connect(server.start(), autocommit=True) as admin:
            admin.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
        dsn = psycopg.conninfo.make_conninfo(server.start(), dbname=name)
        connection = psycopg.connect(dsn, autocommit=True)
        names = [f"t{number}" for number in range(tables)]
        for table in names:
            connection.execute(sql.SQL(_TABLE).format(sql.Identifier(table)))
        settings: dict[str, object] = {
            "name": "bench",
            "slot": name,
            "publication": "cdc_bench",
            "postgres": {"dsn": dsn},
            "tables": [{"name": f"public.{table}"} for table in names],
            "staging": {"uri": (folder / "staging").as_uri()},
            "snapshot": {"mode": "never"},
        }
        start = flusher.run(parse_config(settings, "bench"), until=current_lsn(connection)).flushed
        assert start is not None
        connection.execute(_FILL.encode())
        connection.execute("set synchronous_commit = off")
        connection.execute(
            "call fill(%s, %s, %s)",
            (changes // TRANSACTION_CHANGES, tables, min(tables, TRANSACTION_TABLES)),
        )
        connection.execute("checkpoint")
        end = current_lsn(connection)
        return cls(server, folder, dsn, connection, changes, settings, start, end)

    def read(self, rounds: int, sslmode: str) -> tuple[list[Reading], list[Reading]]:
        """Theirs and ours, by turns; each reads a copy of the slot."""
        theirs, ours = list[Reading](), list[Reading]()
        program = self.server.program("pg_recvlogical")
        dsn = make_conninfo(self.dsn, sslmode=sslmode)
        for number in range(rounds):
            for slot in (f"theirs_{number}", f"ours_{number}"):
                self.connection.execute(
                    "select pg_copy_logical_replication_slot(%s, %s)",
                    (self.settings["slot"], slot),
                )
                server = server_cpu_seconds()
                if slot.startswith("theirs"):
                    file = self.folder / "received"
                    seconds, cpu = recvlogical(str(program), dsn, slot, self.end, file)
                    reading = Reading(seconds, receiver_cpu_seconds=cpu)
                else:
                    self.connection.execute(
                        "update _pg2iceberg.flushed_lsn set lsn = %s", (str(self.start),)
                    )
                    settings = self.settings | {"slot": slot, "postgres": {"dsn": dsn}}
                    reading = _flush(settings, self.end)
                    assert reading.rows == self.changes, reading
                time.sleep(END_SECONDS)
                source = server_cpu_seconds() - server
                reading = replace(reading, source_cpu_seconds=source)
                whose = "pg_recvlogical" if slot.startswith("theirs") else "flusher"
                stderr.print(f"  {whose}: {self.changes / reading.seconds:,.0f} changes/s")
                (theirs if slot.startswith("theirs") else ours).append(reading)
                self.connection.execute("select pg_drop_replication_slot(%s)", (slot,))
        return theirs, ours

    def close(self) -> None:
        self.connection.execute("select pg_drop_replication_slot(%s)", (self.settings["slot"],))
        self.connection.close()


@contextmanager
def _backlog(
    server: EmbeddedPostgres, folder: Path, changes: int, tables: int
) -> Iterator[Backlog]:
    stderr.print(f"making {changes:,} changes of {tables:,} tables")
    backlog = Backlog.make(server, folder, changes, tables)
    try:
        yield backlog
    finally:
        backlog.close()


def _measured(
    backlog: Backlog, tables: int, rounds: int, calibration: Calibration, sslmode: str = PLAIN
) -> dict[str, Any]:
    changes = backlog.changes
    theirs, ours = backlog.read(rounds, sslmode)

    def median(values: Sequence[float]) -> float:
        return statistics.median(values)

    base, wall = median([r.seconds for r in theirs]), median([r.seconds for r in ours])

    def micro(values: Iterable[float]) -> float:
        return round(median([*values]) * 1e6 / changes, 2)

    cpu = micro(r.cpu_seconds for r in ours)
    peers = micro(r.cpu_seconds + r.source_cpu_seconds for r in theirs)
    return {
        "changes": changes,
        "tables": tables,
        "rounds": rounds,
        "pg_recvlogical_seconds": [round(r.seconds, 2) for r in theirs],
        "flusher_seconds": [round(r.seconds, 2) for r in ours],
        "pg_recvlogical_changes_per_second": round(changes / base),
        "flusher_changes_per_second": round(changes / wall),
        "ratio": round(base / wall, 3),
        "cpu_us_per_change": cpu,
        "receiver_cpu_us_per_change": micro(r.receiver_cpu_seconds for r in ours),
        "decoder_cpu_us_per_change": micro(r.decoder_cpu_seconds for r in ours),
        "source_cpu_us_per_change": micro(r.source_cpu_seconds for r in ours),
        "pg_recvlogical_and_source_cpu_us_per_change": peers,
        "cpu_against_pg_recvlogical_and_source": round(cpu / peers, 3),
        "calibration": calibration.shown(cpu_us_per_change=cpu),
        "startup_seconds": round(median([r.startup_seconds for r in ours]), 2),
        "peak_memory_mb": round(max(r.peak_memory for r in ours) / 1e6),
    }


_COST = (
    "changes",
    "tables",
    "pg_recvlogical_changes_per_second",
    "flusher_changes_per_second",
    "ratio",
    "cpu_us_per_change",
    "receiver_cpu_us_per_change",
    "decoder_cpu_us_per_change",
    "source_cpu_us_per_change",
    "cpu_against_pg_recvlogical_and_source",
    "peak_memory_mb",
)


def _through_tls(
    folder: Path, changes: int, rounds: int, calibration: Calibration
) -> dict[str, Any] | None:
    """One table's backlog, read without and with TLS; None without a Postgres that knows TLS."""
    if not _DEBIANS_15.exists():
        stderr.print("no figures with TLS: Debian's Postgres 15 is not installed")
        return None
    issued = Authority(folder / "authority").issue("server", "localhost")
    own(issued.key, server_user())
    files = {"ssl_cert_file": str(issued.certificate), "ssl_key_file": str(issued.key)}
    settings = {**_SETTINGS, "ssl": "on", **files}
    with (
        EmbeddedPostgres(folder / "tls", 15, _DEBIANS_15, settings) as server,
        _backlog(server, folder, changes, 1) as backlog,
    ):
        plain, tls = (_measured(backlog, 1, rounds, calibration, mode) for mode in (PLAIN, TLS))
    return {key: tls[key] for key in _COST} | {"plain": {key: plain[key] for key in _COST}}


def _further(some: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """What each of the changes costs that ``more`` has and ``some`` hasn't, in microseconds."""
    before, after = int(some["changes"]), int(more["changes"])
    cpu = more["cpu_us_per_change"] * after - some["cpu_us_per_change"] * before
    seconds = after / more["flusher_changes_per_second"]
    seconds -= before / some["flusher_changes_per_second"]
    return {
        "tables": more["tables"],
        "changes": after - before,
        "cpu_us_per_change": round(cpu / (after - before), 2),
        "us_per_change": round(1e6 * seconds / (after - before), 2),
        "peak_memory_mb": more["peak_memory_mb"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--changes", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tables", type=int, nargs="*", default=[100, 1000])
    parser.add_argument("--smaller", type=int, default=4, help="1: no second backlog")
    parser.add_argument("--larger", type=int, default=2, help="1: no third backlog")
    parser.add_argument("--flush", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.flush:
        settings, until = options.flush
        _flush_here(json.loads(settings), Lsn.parse(until))
        return
    with tempfile.TemporaryDirectory(prefix="bench_flusher-") as made:
        folder = Path(made)
        folder.chmod(0o755)
        calibration = calibrate(stderr.print)
        with EmbeddedPostgres(folder / "postgres", settings=_SETTINGS) as server:

            def cost(changes: int, tables: int) -> dict[str, Any]:
                with _backlog(server, folder, changes, tables) as backlog:
                    found = _measured(backlog, tables, options.rounds, calibration)
                return {key: found[key] for key in _COST}

            with _backlog(server, folder, options.changes, 1) as backlog:
                found = _measured(backlog, 1, options.rounds, calibration)
            by_tables = [cost(options.changes, tables) for tables in options.tables]
            found["by_tables"] = by_tables
            if options.smaller > 1:
                found["by_backlog"] = [cost(options.changes // options.smaller, 1)]
            if options.larger > 1:
                found["further"] = [
                    _further(some, cost(options.changes * options.larger, some["tables"]))
                    for some in (found, *by_tables)
                ]
        found["tls"] = _through_tls(folder, options.changes, options.rounds, calibration)
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main()
