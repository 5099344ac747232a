"""``make audit``: what it can't look up isn't taken for well, nor for a failure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "audit"


@pytest.mark.parametrize(("required", "code"), [("0", 0), ("1", 1)])
def test_a_database_that_cannot_be_reached_is_said(required: str, code: int) -> None:
    environment = {**os.environ, "OSV_URL": "http://127.0.0.1:1/", "AUDIT_REQUIRED": required}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    assert "NOT AUDITED" in done.stderr
