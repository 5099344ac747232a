"""Where Python doesn't look for cycles, and that it does again afterwards."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

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


def test_the_collector_is_never_left_off_by_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second looks at how it is, and the first leaves, before the second goes on."""
    on, began, left = gc.isenabled, threading.Event(), threading.Event()

    def second() -> None:
        with uncollected():
            began.set()

    def looked() -> bool:
        found = on()
        if threading.current_thread() is thread:
            began.set()
            left.wait(60)
        return found

    thread = threading.Thread(target=second)
    monkeypatch.setattr(gc, "isenabled", looked)
    with uncollected():
        thread.start()
        assert began.wait(60)
    left.set()
    thread.join()
    is_on = on()
    gc.enable()
    assert is_on
