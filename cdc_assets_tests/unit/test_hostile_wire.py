"""Forged lengths and counts are refused by name: the decoder neither ends, hangs nor skips."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest


def _decode(seed: int, seconds: float) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cdc_assets_tests.hostile_wire", str(seed), str(seconds)],
        capture_output=True,
        check=False,
        text=True,
        timeout=seconds + 60,
    )
    last = "\n".join(done.stderr.splitlines()[-12:])
    assert done.returncode == 0, f"seed {seed} ended with {done.returncode}:\n{last}"


def test_forged_streams() -> None:
    _decode(1, 2.0)


@pytest.mark.soak
def test_forged_streams_for_long() -> None:
    _decode(random.randrange(2**32), float(os.environ.get("CDC_ASSETS_SOAK_SECONDS", "60")))
