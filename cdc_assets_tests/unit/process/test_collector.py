"""Where Python doesn't look for cycles, and that it does again afterwards."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from cdc_assets.process.collector import uncollected


def test_the_collector_is_as_before_afterwards() -> None:
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), uncollected():
        raise ZeroDivisionError
    assert gc.isenabled()


def test_what_a_code_location_imports_is_not_collected() -> None:
    lines = (
        "import gc, dagster; before = gc.get_stats()[0]['collections'];"
        " import cdc_assets.components;"
        " print(gc.get_stats()[0]['collections'] - before, gc.isenabled())"
    )
    done = subprocess.run(
        [sys.executable, "-c", lines], capture_output=True, text=True, check=True, timeout=120
    )
    collections, enabled = done.stdout.split()
    assert int(collections) < 20  # hundreds, if it were
    assert enabled == "True"
