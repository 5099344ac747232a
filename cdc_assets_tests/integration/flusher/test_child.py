"""The flusher as a child process: how its configuration gets there, whatever its size."""

from __future__ import annotations

from pathlib import Path

import psutil

from cdc_assets.config.source import parse_config
from cdc_assets.flusher.child import flusher_child
from cdc_assets.process.children import Child


def test_thousands_of_tables_and_no_secret_in_the_environment(tmp_home: Path) -> None:
    tables = [{"name": f"accounting.ledger_of_the_year_{n:05}"} for n in range(2_000)]
    dsn = "postgresql://cdc:pLanTed@127.0.0.1:1/none"
    config = parse_config({"name": "many", "postgres": {"dsn": dsn}, "tables": tables}, "test")
    child = Child.start(flusher_child(config))
    environment = psutil.Process(child.pid).environ()
    try:
        assert child.wait(60.0) == 1
    finally:
        child.stop()
    log = (tmp_home / "many" / "flusher.log").read_text()
    assert "connection" in log  # it has read its configuration and looked for the source
    assert "Traceback" not in log
    told = " ".join([*environment, *environment.values()])
    assert "pLanTed" not in told + log
    assert "ledger_of_the_year" not in told
