"""Log sequence numbers as values.

An LSN is a byte position in the write-ahead log, printed as two hexadecimal halves
(https://www.postgresql.org/docs/current/datatype-pg-lsn.html). Comparing the printed form is
wrong ("9/0" > "10/0"); this type compares the number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Self

# A page of WAL begins with a header of 24 or 40 bytes. A server's position may be just behind it,
# which no reader reaches before the next record; any transaction is longer.
PAGE_HEADER_BYTES = 40

_PRINTED = re.compile(r"\A([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})\Z")


@dataclass(frozen=True, slots=True, order=True)
class Lsn:
    """A position in the WAL, in bytes from its beginning."""

    value: int

    ZERO: ClassVar[Lsn]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the printed form, such as ``0/16B3748``; raises ValueError for anything else."""
        match = _PRINTED.match(text.strip())
        if match is None:
            raise ValueError(f"{text!r} is not an LSN: expected two hexadecimal numbers, 0/16B3748")
        return cls((int(match[1], 16) << 32) | int(match[2], 16))

    def __str__(self) -> str:
        return f"{self.value >> 32:X}/{self.value & 0xFFFFFFFF:X}"

    def __int__(self) -> int:
        return self.value

    def __sub__(self, other: Lsn) -> int:
        """How many bytes of WAL lie between ``other`` and this position."""
        return self.value - other.value


Lsn.ZERO = Lsn(0)
