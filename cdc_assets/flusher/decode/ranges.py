"""Ranges of a buffer as an Arrow array, copied in C."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from cdc_assets.postgres.pgoutput import Bytes, Ints


def ranges(data: Bytes, begin: Ints, end: Ints) -> pa.LargeBinaryArray:
    """Copies of the ranges ``data[begin[i]:end[i]]``.

    The trick: over offsets that alternate between beginnings and ends, every even element is a
    range and every odd one a gap; taking the even ones copies the ranges.
    """
    if len(begin) == 0:
        return pa.array([], pa.large_binary())
    offsets = np.empty(2 * len(begin), np.int64)
    offsets[0::2], offsets[1::2] = begin, end
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    among = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)
    return among.take(pa.array(np.arange(0, len(offsets), 2, dtype=np.int32)))
