"""Ctrl-C while the command is still importing what it needs: no Python traceback."""

from __future__ import annotations

import signal
import subprocess
import sys
import tomllib
from pathlib import Path

# What the installed script does, interrupted when it comes to the first large import.
_SCRIPT = """
import os, signal, sys

class Interrupts:
    def find_spec(self, name, *_):
        if name == "psycopg":
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupts())
from {module} import {function}
{function}()
"""


def test_ctrl_c_while_it_begins_shows_no_trace() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    module, function = project["project"]["scripts"]["cdc-assets"].split(":")
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT.format(module=module, function=function)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")
