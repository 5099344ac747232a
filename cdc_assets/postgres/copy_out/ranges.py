"""Ranges of a buffer as an Arrow array, copied in C."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from cdc_assets.postgres.pgoutput import Bytes, Ints, Mask

_BYTES = pa.large_binary()


def ranges(
    data: Bytes,
    begin: Ints,
    end: Ints,
    kind: pa.DataType = _BYTES,
    null: Mask | None = None,
) -> pa.Array:
    """Copies of the ranges ``data[begin[i]:end[i]]``; ``null``: which are none.

    ``kind``: text or bytes. The trick: over
    offsets that alternate between beginnings and ends, every even element is a range and every odd
    one a gap; taking the even ones copies the ranges.
    """
    if len(begin) == 0:
        return pa.array([], kind)
    wide = kind in (pa.large_binary(), pa.large_string())
    if not wide and len(data) > np.iinfo(np.int32).max:
        large = pa.large_string() if kind == pa.string() else pa.large_binary()
        return ranges(data, begin, end, large, null).cast(kind)
    offsets = np.empty(2 * len(begin), np.int64 if wide else np.int32)
    offsets[0::2], offsets[1::2] = begin, end
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    among = pa.Array.from_buffers(kind, len(offsets) - 1, buffers)
    wanted = np.arange(0, len(offsets), 2, dtype=np.int32)
    return among.take(pa.array(wanted, mask=null))
