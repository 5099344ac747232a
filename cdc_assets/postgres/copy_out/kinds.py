"""How COPY sends the columns of a query, and what becomes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

# What a decimal that fits 64 bits has at most.
MAX_DIGITS: Final = 18

# Types whose values have one size, and what the values are in memory.
FIXED: Final[dict[str, np.dtype[Any]]] = {
    "bool": np.dtype("i1"),
    "int2": np.dtype("i2"),
    "int4": np.dtype("i4"),
    "int8": np.dtype("i8"),
    "float4": np.dtype("f4"),
    "float8": np.dtype("f8"),
    "date": np.dtype("i4"),
    "timestamp": np.dtype("i8"),
}


@dataclass(frozen=True, slots=True)
class Kind:
    """How a column is sent, and what is to become of it.

    ``sent``: a type of fixed size (``FIXED``), ``text``, ``bytea``, ``numeric`` (of at most
    18 digits), or one of these with ``[]`` behind it, for lists. ``arrow``: the type it will have
    in the end, which says how many digits a decimal has; anything else arrives as it is sent.
    """

    sent: str
    arrow: pa.DataType


SQL_TYPES: Final[dict[str, tuple[str, ...]]] = {
    "bool": ("boolean",),
    "int2": ("smallint",),
    "int4": ("integer",),
    "int8": ("bigint",),
    "float4": ("real",),
    "float8": ("double precision",),
    "date": ("date",),
    "timestamp": ("timestamp without time zone", "timestamp with time zone"),
    "numeric": ("numeric",),
    "bytea": ("bytea",),
    "text": ("text", "character varying", "character"),
}
"""The types, as Postgres calls them, whose values are sent so."""

TEXT: Final = Kind("text", pa.string())
INT8: Final = Kind("int8", pa.int64())
