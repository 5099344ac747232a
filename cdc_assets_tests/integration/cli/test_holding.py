"""``pin --hold``: it waits, and holds, until it is interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

from cdc_assets.config.source import parse_config
from cdc_assets.pins.pins import Pins
from cdc_assets.pipeline import Pipeline
from cdc_assets.process.home import home
from cdc_assets_tests.integration.pins.pinning import PLAIN, stranger
from cdc_assets_tests.support.flusher import Bench
from cdc_assets_tests.support.waiting import wait_for


def test_it_ends_at_once_while_it_waits_for_transactions(source: Bench, tmp_path: Path) -> None:
    source.execute(f"{PLAIN}; create table o (id int)")
    settings = {**source.settings("t"), "snapshot": {"from": {"kind": "dump"}}}
    with closing(Pins(Pipeline.open(parse_config(settings, "test")))) as pins:
        pins.prepare()  # the slot
    file = tmp_path / "source.json"
    file.write_text(json.dumps(settings))
    there = "select 1 from pg_stat_activity where application_name like 'cdc_assets % pins'"
    with stranger(source.dsn, "insert into o values (1)"):
        command = [sys.executable, "-m", "cdc_assets", "--config", str(file), "pin", "--hold"]
        held = subprocess.Popen(command, env={**os.environ, "CDC_ASSETS_HOME": str(home())})
        try:
            wait_for(lambda: source.execute(there), 60)
            time.sleep(1)
            held.send_signal(signal.SIGINT)
            assert held.wait(20) == 130
        finally:
            held.kill()
            held.wait()


def test_it_says_so_if_its_session_ends(source: Bench, tmp_path: Path) -> None:
    source.execute(PLAIN)
    file = tmp_path / "source.json"
    file.write_text(json.dumps({**source.settings("t"), "snapshot": {"from": {"kind": "dump"}}}))
    ends = (
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where application_name like 'cdc_assets % pin' and state = 'idle in transaction'"
    )
    command = [sys.executable, "-m", "cdc_assets", "--config", str(file), "pin", "--hold"]
    held = subprocess.Popen(
        command, env={**os.environ, "CDC_ASSETS_HOME": str(home())}, stderr=subprocess.PIPE
    )
    try:
        wait_for(lambda: source.execute(ends), 60)
        _, said = held.communicate(timeout=30)
        assert held.returncode == 1
        assert b"isn't held any more" in said
    finally:
        held.kill()
        held.wait()


def test_it_ends_at_once_while_the_slot_is_made(source: Bench, tmp_path: Path) -> None:
    source.execute(f"{PLAIN}; create table o (id int)")
    file = tmp_path / "source.json"
    file.write_text(json.dumps({**source.settings("t"), "snapshot": {"from": {"kind": "dump"}}}))
    waits = "select 1 from pg_stat_activity where query ~ '^CREATE_REPLICATION_SLOT'"
    slots = "select 1 from pg_replication_slots where database = current_database()"
    with stranger(source.dsn, "insert into o values (1)"):
        command = [sys.executable, "-m", "cdc_assets", "--config", str(file), "pin", "--hold"]
        held = subprocess.Popen(command, env={**os.environ, "CDC_ASSETS_HOME": str(home())})
        try:
            wait_for(lambda: source.execute(waits), 60)
            held.send_signal(signal.SIGINT)
            assert held.wait(20) == 130
            wait_for(lambda: not source.execute(slots), 10)
        finally:
            held.kill()
            held.wait()
