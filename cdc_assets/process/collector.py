"""Python's collector of cycles, while what is made stays anyhow."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

_lock = Lock()
# Of each block that is under way, in whatever threads: whether it was the one that disabled it.
_blocks = list[bool]()


@contextmanager
def uncollected() -> Iterator[None]:
    """While it lasts, Python doesn't look for cycles; for work whose objects nearly all stay.

    It would go through all of them again and again: a quarter of such work's time.
    """
    with _lock:
        _blocks.append(not _blocks and gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            if _blocks.pop():  # the first one's comes last, whichever block ends last
                gc.enable()
