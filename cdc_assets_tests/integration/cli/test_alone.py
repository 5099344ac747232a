"""``flush`` and ``materialize --follow`` alone: from nothing to a lake that is kept current."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from cdc_assets.log.copies.chunks import being_read
from cdc_assets.log.states import TableState
from cdc_assets.process.home import home
from cdc_assets_tests.support.lake import Lake, NewLake
from cdc_assets_tests.support.waiting import wait_for

pytestmark = pytest.mark.spark

SETUP = """
create table t (id int primary key, v text);
insert into t select i, 'v' || i from generate_series(1, 1000) i;
"""


@contextmanager
def commands(source: Lake, folder: Path, *each: tuple[str, ...]) -> Iterator[list[Path]]:
    """Each command in a process of its own, until the end; their logs."""
    file = folder / "source.json"
    file.write_text(source.config.dump())
    logs, children = [], []
    for arguments in each:
        logs.append(folder / f"{arguments[0]}.log")
        with logs[-1].open("wb") as log:
            children.append(
                subprocess.Popen(
                    [sys.executable, "-m", "cdc_assets", "--config", str(file), *arguments],
                    env={**os.environ, "CDC_ASSETS_HOME": str(home())},
                    stdout=log,
                    stderr=log,
                )
            )
    try:
        yield logs
        for child in children:
            child.terminate()
        for child in children:
            assert child.wait(30) == 0, [log.read_text() for log in logs]
    finally:
        for child in children:
            child.kill()
            child.wait()


def test_a_table_that_nobody_else_copies_is_copied_by_the_follower(
    new_lake: NewLake, tmp_path: Path
) -> None:
    with (
        new_lake(SETUP, "t") as source,
        commands(source, tmp_path, ("flush",), ("materialize", "--follow")) as logs,
    ):
        [table] = [table.id for table in source.config.tables]

        def state() -> TableState | None:
            row = source.pipeline.store.table(table)
            return row.state if row is not None else None

        wait_for(lambda: state() == TableState.STREAMING, 120)
        assert "100 %" in logs[1].read_text()
        source.execute("update t set v = 'later' where id <= 10")
        wait_for(lambda: source.equal(table), 60)


def test_a_follower_ends_at_once_while_it_copies(new_lake: NewLake, tmp_path: Path) -> None:
    """Its Spark, which goes on, has a job that somebody's lock holds up for as long as it takes."""
    with (
        new_lake(SETUP, "t") as source,
        psycopg.connect(source.pipeline.source_dsn) as other,
        commands(source, tmp_path, ("flush",), ("materialize", "--follow")),
    ):
        wait_for(lambda: source.pipeline.store.tables(None, TableState.COPYING), 120)
        other.execute("lock table t in access exclusive mode")
        wait_for(lambda: being_read(source.pipeline.store), 120)
