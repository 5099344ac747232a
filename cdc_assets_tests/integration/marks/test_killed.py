"""``cdc-assets mark`` is killed at any moment: the same command goes on, and the sums are right."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import yaml

from cdc_assets.log.asked import marks as log
from cdc_assets.log.asked.marks import MarkState
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support.lake import NewLake
from cdc_assets_tests.support.waiting import wait_for

pytestmark = pytest.mark.spark

TABLES = 12
SETUP = "".join(
    f"create table t{n} (id int primary key, v int); insert into t{n} values (1, 0);"
    for n in range(TABLES)
)


def test_a_mark_that_is_killed_is_gone_on_with_where_it_was(
    copied_lake: NewLake, tmp_path: Path
) -> None:
    names = [f"public.t{n}" for n in range(TABLES)]
    with copied_lake(SETUP, *names) as source:
        for name in names:
            source.execute(f"update {name} set v = 1")
        file = tmp_path / "src.yaml"
        settings = source.config.model_dump(mode="json", include={"name", "spark"})
        assert source.config.postgres.dsn is not None
        settings["postgres"] = {"dsn": source.config.postgres.dsn.get_secret_value()}
        settings["tables"] = [{"name": name} for name in names]
        file.write_text(yaml.safe_dump(settings))
        file.chmod(0o600)
        command = [sys.executable, "-m", "cdc_assets", "--config", str(file), "mark", "killed"]

        def tagged() -> int:
            known = log.marks(source.pipeline.store, "killed")
            return len(known[0].of(MarkState.TAGGED)) if known else -1

        for least in (0, 4, 8):  # as soon as it is made, and in its midst
            before = tagged()
            with subprocess.Popen(command) as running:
                wait_for(partial(_is_at_least, tagged, least), 120.0)
                running.kill()
            assert before <= tagged() < TABLES
        for name in names:
            source.execute(f"update {name} set v = 9")
        source.flush()
        for name in names[::2]:  # others merge some of them meanwhile
            source.drain(TableId.parse(name))
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert tagged() == TABLES
        for name in names:
            lake = source.lake_table(TableId.parse(name)).sql_name
            [row] = source.session.sql(
                f"select v from {lake} version as of 'mark_killed'"
            ).collect()
            assert row[0] == 1, name
        again = subprocess.run(command, capture_output=True, text=True, check=False)
        assert again.returncode != 0
        assert "there is a mark killed already" in again.stderr


def _is_at_least(tagged: Callable[[], int], least: int) -> bool:
    return tagged() >= least
