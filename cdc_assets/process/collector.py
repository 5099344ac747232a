"""Python's collector of cycles, while what is made stays anyhow."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

_lock = Lock()
# How many blocks are under way, in whatever threads; whether the first of them found it enabled.
_blocks, _collects = 0, False


@contextmanager
def uncollected() -> Iterator[None]:
    """While it lasts, Python doesn't look for cycles; for work whose objects nearly all stay.

    It would go through all of them again and again: a quarter of such work's time.
    """
    global _blocks, _collects  # noqa: PLW0603 - the collector is the process's, too
    with _lock:
        if not _blocks:
            _collects = gc.isenabled()
            gc.disable()
        _blocks += 1
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            if not _blocks and _collects:
                gc.enable()
