"""How a process that does the same work again and again keeps the memory that it frees.

By default NumPy's, gRPC's and Arrow's large buffers go back to the kernel after each batch, and the
kernel clears every page of the next one: a third of a merging process's CPU. On a C library without
glibc's ``mallopt``, and on a Mac, all stays as it is.
"""

from __future__ import annotations

import ctypes
import os
import sys

import pyarrow as pa

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# The largest that glibc takes for blocks of a mapping of their own.
_MMAP_BYTES = 32 * 2**20


def keep_freed(limit_bytes: int) -> bool:
    """Keep freed memory for what comes; whether it is done.

    Up to about ``limit_bytes`` of the main thread's. Another thread's stays as large as its largest
    batch was, in blocks of up to 64 MB, until :func:`release_freed`.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    done = mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES) and mallopt(_M_TRIM_THRESHOLD, limit_bytes)
    if done and "ARROW_DEFAULT_MEMORY_POOL" not in os.environ:
        pa.set_memory_pool(pa.system_memory_pool())
    return bool(done)


def release_freed() -> bool:
    """Give freed memory of all threads back to the kernel; whether there was any."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    return trim is not None and bool(trim(0))
