"""SIGKILL at every step of the flusher: nothing is lost, nothing is in the log's effect twice.

The soak (``make soak``) repeats it hundreds of times; its seeds are printed, and
``CDC_ASSETS_SOAK_SEED`` and ``CDC_ASSETS_SOAK_SECONDS`` choose others.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import psycopg
import pytest

from cdc_assets.postgres.lsn import Lsn
from cdc_assets_tests.faults.killed_at import DECODER, PINS, RECEIVER
from cdc_assets_tests.faults.ledger import TABLE, check, writing
from cdc_assets_tests.support.flusher import Bench, start_flusher
from cdc_assets_tests.support.waiting import wait_for

# Small enough that every step is passed many times a second, parts of open transactions included.
OPTIONS = {"flush_interval": "20ms", "flush_bytes": "5kB"}
STEPS = [*RECEIVER, *DECODER]
ONCE = "a decoder is started"


def _run_until_killed(source: Bench, step: str, passes: int, *tables: str) -> None:
    """Start a flusher that kills itself at the step, or kill its receiver when its decoder does."""
    module = "cdc_assets_tests.faults.killed_at"
    file = source.config_file(*tables, **OPTIONS)
    child = start_flusher(file, module, step, str(passes))
    try:
        code = child.wait(60)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        raise
    if step in DECODER:
        assert code == 1, (step, passes)  # it noticed, and said so
        log = (source.folder / "flusher.log").read_text()
        assert "the decoder process ended without a word" in log
        assert "SIGKILL ended it" in log
    else:
        assert code == -signal.SIGKILL, (step, passes)


def _passes(chance: random.Random, step: str, most: int) -> int:
    return 1 if step == ONCE else chance.randint(1, most)


def test_every_step_once(source: Bench) -> None:
    source.execute(TABLE)
    source.flush(source.config("public.t", **OPTIONS))
    chance = random.Random(5)
    with writing(source, seed=5, pause=0.1):
        for step in STEPS:
            _run_until_killed(source, step, _passes(chance, step, 4), "public.t")
    source.flush(source.config("public.t", **OPTIONS))
    assert check(source) > 500


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_every_step_hundreds_of_times(source: Bench) -> None:
    seed = int(os.environ.get("CDC_ASSETS_SOAK_SEED") or time.time())
    until = time.monotonic() + float(os.environ.get("CDC_ASSETS_SOAK_SECONDS") or 1800)
    chance, kills, rows = random.Random(seed), Counter[str](), 0
    sys.stdout.write(f"seed {seed}\n")
    number = 0
    while time.monotonic() < until:
        # A new log now and then: to read it all each time would take ever longer.
        number += 1
        source.execute("drop table if exists t")
        source.execute(TABLE)
        config = source.config("public.t", **OPTIONS)
        source.execute("drop schema if exists _pg2iceberg cascade")
        source.execute(
            "select pg_drop_replication_slot(slot_name) from pg_replication_slots"
            " where slot_name = %s",
            config.slot,
        )
        source.flush(config)
        with writing(source, seed=seed + number, pause=0.1):
            for step in chance.sample(STEPS, len(STEPS)):
                _run_until_killed(source, step, _passes(chance, step, 12), "public.t")
                kills[step] += 1
        source.flush(config)
        found = check(source)
        rows += found
        sys.stdout.write(f"{kills.total()} kills, {found} rows in this log, {rows} in all\n")
        sys.stdout.flush()
    sys.stdout.write(f"{dict(kills)}\n")


@pytest.mark.parametrize("step", PINS)
def test_killed_around_the_pin(source: Bench, step: str) -> None:
    """What committed from the pin on is in the log, whichever start made it; what is before isn't.

    ``c`` is the pin: a row whose transaction began to commit above it can't be missing, and one
    that was committed before it can't be there with a commit above it.
    """
    source.execute("create table t (n int primary key)")
    stop, begun = threading.Event(), list[Lsn]()

    def write() -> None:
        with psycopg.connect(source.dsn, autocommit=True) as writer:
            while not stop.wait(0.005):
                row = writer.execute("select pg_current_wal_insert_lsn()::text").fetchone()
                assert row is not None
                begun.append(Lsn.parse(row[0]))
                writer.execute("insert into t values (%s)", (len(begun) - 1,))

    thread = threading.Thread(target=write)
    thread.start()
    try:
        _run_until_killed(source, step, 1, "public.t")
        # The next start has to go on from whatever is there; and again, for a table added later.
        source.execute("create table u (n int primary key)")
        _run_until_killed(source, step, 1, "public.t", "public.u")
        child = start_flusher(source.config_file("public.t", "public.u", **OPTIONS))
        try:
            wait_for(
                lambda: source.execute(
                    "select 1 from _pg2iceberg.tables where snapshot_lsn is not null"
                    " having count(*) = 2"
                )
            )
            source.execute("insert into u values (1)")
            wait_for(lambda: len(source.log("public.u")) == 1)
        finally:
            child.kill()
            child.wait()
    finally:
        stop.set()
        thread.join()
    source.flush(source.config("public.t", "public.u", **OPTIONS))
    (pin,) = source.execute(
        "select snapshot_lsn::text from _pg2iceberg.tables where table_name = 'public.t'"
    )
    at = Lsn.parse(pin[0])
    logged = [int(r.data["n"] or 0) for r in source.log("public.t") if r.commit_lsn >= int(at)]
    assert logged
    assert logged == list(range(logged[0], len(begun)))
    assert all(lsn < at for lsn in begun[: logged[0]])
