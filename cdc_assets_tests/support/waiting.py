"""Waiting for what other processes and threads do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def wait_for(look: Callable[[], Found], seconds: float = 60) -> Found:
    """What is found once it is true, looking often; an assertion fails after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, f"still not so after {seconds} s"
        time.sleep(0.05)
    return found
