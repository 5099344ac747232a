"""Without DAGSTER_HOME `dagster dev` forgets its runs; Dagster says so itself, first of all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCHING = "Launching Dagster services"


def said_first(folder: Path, home: Path | None) -> str:
    """What `dagster dev` prints before it starts anything."""
    (folder / "defs.py").write_text("import dagster as dg\ndefs = dg.Definitions()\n")
    environment = {name: text for name, text in os.environ.items() if name != "DAGSTER_HOME"}
    if home is not None:
        home.mkdir()
        environment["DAGSTER_HOME"] = str(home)
    process = subprocess.Popen(
        [sys.executable, "-m", "dagster", "dev", "-f", "defs.py", "-p", "0"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # what it starts ends with it
    )
    assert process.stdout is not None
    lines = list[str]()
    try:
        for line in process.stdout:
            lines.append(line)
            if LAUNCHING in line:
                break
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert LAUNCHING in lines[-1], lines
    return "".join(lines)


@pytest.mark.timeout(120)
def test_a_temporary_home_is_told_with_the_way_out(tmp_path: Path) -> None:
    said = said_first(tmp_path, None)
    assert "Using temporary directory" in said
    assert "set the environment variable DAGSTER_HOME" in said


@pytest.mark.timeout(120)
def test_a_home_that_stays_is_not_warned_of(tmp_path: Path) -> None:
    assert "temporary directory" not in said_first(tmp_path, tmp_path / "home")
