"""Several processes at one copy, and what becomes of it when they are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cdc_assets.observe.status import collect
from cdc_assets.process.home import home
from cdc_assets_tests.integration.snapshot.sources import WIDE, T
from cdc_assets_tests.support.lake import Lake, NewLake
from cdc_assets_tests.support.waiting import wait_for

pytestmark = pytest.mark.spark


def configuration(source: Lake, folder: Path) -> Path:
    path = folder / "source.json"
    path.write_text(source.config.dump())
    return path


def snapshot_process(path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "cdc_assets", "--config", str(path), "snapshot"],
        env={**os.environ, "CDC_ASSETS_HOME": str(home())},
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def large(new_lake: NewLake, request: pytest.FixtureRequest) -> Iterator[Lake]:
    setup = WIDE.replace("20000", "150000") + "create table u as table t; alter table u add"
    setup += " primary key (id);"
    with new_lake(
        setup,
        {"name": "t", "chunk_pages": 8},
        {"name": "u", "chunk_pages": 8},
        snapshot={
            "strategy": getattr(request, "param", "pinned"),
            "hold_at_most": "0.1s",
            "max_parallel_chunks": 1,
            "max_parallel_tables": 1,
        },
    ) as opened:
        yield opened


def claimers(source: Lake) -> set[Any]:
    rows = source.execute("select distinct claimed_by from _pg2iceberg.snapshot_progress")
    return {str(row[0]).rsplit("/", 1)[0] for row in rows if row[0]}


def test_two_processes_that_start_at_once_share_the_copy(large: Lake, tmp_path: Path) -> None:
    path = configuration(large, tmp_path)
    both = [snapshot_process(path) for _ in range(2)]
    for process in both:
        _, said = process.communicate()
        assert process.returncode == 0, said
    assert {row.state for row in large.pipeline.store.tables()} == {"streaming"}
    assert len(claimers(large)) == 2
    large.catch_up()
    assert all(comparison.equal for comparison in large.verify())


def test_a_killed_process_is_made_up_for_by_the_other(large: Lake, tmp_path: Path) -> None:
    path = configuration(large, tmp_path)
    victim, survivor = snapshot_process(path), snapshot_process(path)

    def both_work() -> bool:
        rows = large.execute(
            "select count(distinct claimed_by) from _pg2iceberg.snapshot_progress"
            " where state = 'claimed'"
        )
        return bool(rows and rows[0][0])

    wait_for(lambda: bool(large.execute("select to_regclass('_pg2iceberg.tables')")))
    wait_for(both_work, 60.0)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    _, said = survivor.communicate()
    assert survivor.returncode == 0, said
    large.execute("update t set v = 'changed' where id % 7 = 0")
    large.catch_up()
    assert large.equal(T)


@pytest.mark.parametrize("large", ["pinned", "incremental"], indirect=True)
def test_a_copy_killed_again_and_again_ends_with_the_truth(large: Lake, tmp_path: Path) -> None:
    """The only process is killed at moments that come closer; changes go on all the while."""
    path = configuration(large, tmp_path)
    delay = 3.0
    for round_ in range(4):
        process = snapshot_process(path)
        time.sleep(delay + round_)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert process.stderr is not None
        process.stderr.close()
        marker = uuid.uuid4().hex[:8]
        large.execute(f"update t set v = '{marker}' where id % 1000 = {round_}")
        large.execute(f"delete from t where id % 1001 = {round_}")
    process = snapshot_process(path)
    _, said = process.communicate()
    assert process.returncode == 0, said
    large.catch_up()
    assert all(comparison.equal for comparison in large.verify())


def test_progress_is_seen_in_the_status_and_somebody_streams_meanwhile(
    large: Lake, tmp_path: Path
) -> None:
    path = configuration(large, tmp_path)
    process = snapshot_process(path)
    seen: list[dict[str, Any]] = []
    streamed = False
    # Not by the command: its start takes as long as half of the copy.
    while process.poll() is None:
        found = collect(large.pipeline).to_json()
        seen += found["tables"]
        streamed = streamed or found["slot"]["active"]
        time.sleep(0.05)
    assert process.stderr is not None
    process.stderr.close()
    rates = [table["copy_rows_per_second"] for table in seen if table["state"] == "copying"]
    assert any(rate for rate in rates), seen[-2:]
    assert streamed, "else WAL would pile up while a large table is copied"
