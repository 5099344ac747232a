"""``pin --hold``: it waits, and holds, until it is interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from cdc_assets.config.source import parse_config
from cdc_assets.pins.pins import Pins
from cdc_assets.pipeline import Pipeline
from cdc_assets.process.home import home
from cdc_assets_tests.integration.pins.pinning import PLAIN, stranger
from cdc_assets_tests.support.flusher import Bench
from cdc_assets_tests.support.waiting import wait_for


def configured(source: Bench) -> dict[str, Any]:
    return {**source.settings("t"), "snapshot": {"from": {"kind": "dump"}}}


@contextmanager
def holding(source: Bench, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The command, which is killed in the end if it goes on."""
    file = folder / "source.json"
    file.write_text(json.dumps(configured(source)))
    command = [sys.executable, "-m", "cdc_assets", "--config", str(file), "pin", "--hold"]
    held = subprocess.Popen(
        command, env={**os.environ, "CDC_ASSETS_HOME": str(home())}, stderr=subprocess.PIPE
    )
    try:
        yield held
    finally:
        held.kill()
        held.communicate()


def test_it_ends_at_once_while_it_waits_for_transactions(source: Bench, tmp_path: Path) -> None:
    source.execute(f"{PLAIN}; create table o (id int)")
    with closing(Pins(Pipeline.open(parse_config(configured(source), "test")))) as pins:
        pins.prepare()  # the slot
    there = "select 1 from pg_stat_activity where application_name like 'cdc_assets % pins'"
    with stranger(source.dsn, "insert into o values (1)"), holding(source, tmp_path) as held:
        wait_for(lambda: source.execute(there), 60)
        time.sleep(1)
        held.send_signal(signal.SIGINT)
        assert held.wait(20) == 130


def test_it_says_so_if_its_session_ends(source: Bench, tmp_path: Path) -> None:
    source.execute(PLAIN)
    ended = (
        "select count(pg_terminate_backend(pid)) from pg_stat_activity"
        " where application_name like 'cdc_assets % pin' and state = 'idle in transaction'"
    )
    with holding(source, tmp_path) as held:
        assert held.stderr is not None
        assert any(line.startswith(b"It is held until") for line in held.stderr)
        assert source.execute(ended) == [(1,)]
        _, said = held.communicate(timeout=30)
        assert held.returncode == 1
        assert b"isn't held any more" in said


def test_it_ends_at_once_while_the_slot_is_made(source: Bench, tmp_path: Path) -> None:
    source.execute(f"{PLAIN}; create table o (id int)")
    waits = "select 1 from pg_stat_activity where query ~ '^CREATE_REPLICATION_SLOT'"
    slots = "select 1 from pg_replication_slots where database = current_database()"
    with stranger(source.dsn, "insert into o values (1)"), holding(source, tmp_path) as held:
        wait_for(lambda: source.execute(waits), 60)
        held.send_signal(signal.SIGINT)
        assert held.wait(20) == 130
        wait_for(lambda: not source.execute(slots), 10)
