"""Python's collector of cycles, while what is made stays anyhow."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """While it lasts, Python doesn't look for cycles; for work whose objects nearly all stay.

    It would go through all of them again and again: a quarter of such work's time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
