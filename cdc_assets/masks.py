"""Masks: what of a column's value leaves the source, where the value itself may not.

A mask is applied where a value is read: by the decoder before anything is staged, by the tasks of a
copy before a file is written, and wherever rows are read again or compared. A masked column is text
in the lake. NULL stays NULL; equal values stay equal.

Pure functions, which run in Spark's Python workers and in the decoder process, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Final, Literal, Self, cast

if TYPE_CHECKING:  # few commands need it
    import pyarrow as pa

MaskKind = Literal["sha256", "redact", "last4"]

_REDACTED: Final = b"***"
_STARS: Final = b"****"
# ``last4`` shows the end of values that are at least so long: of a shorter one it is too much.
_SHOWN, _LONG_ENOUGH = 4, 8
# Of a salt, to tell it from another: too few bits to know it by.
_FINGERPRINT_DIGITS: Final = 8


def rules_of(masks: Mapping[str, Mask]) -> dict[str, str]:
    """How the log records the masks of columns."""
    return {name: mask.rule for name, mask in masks.items()}


def makes(rules: Iterable[str], salt: bytes) -> bool:
    """Whether masks that are salted with ``salt`` follow all of these recorded rules."""
    return all(Mask.of_rule(rule, salt).rule == rule for rule in rules)


@dataclass(frozen=True, slots=True)
class Mask:
    """One column's mask.

    ``sha256``: 64 hexadecimal digits, the SHA-256 of ``salt`` and then the value's text.
    ``redact``: three stars. ``last4``: four stars and the last four characters, or the stars alone
    for a text of less than eight.
    """

    kind: MaskKind
    salt: bytes = field(default=b"", repr=False)

    @property
    def rule(self) -> str:
        """How the log records the mask: its kind, and a fingerprint of the salt that it takes."""
        if self.kind != "sha256":
            return self.kind
        return f"sha256:{sha256(b'cdc_assets mask ' + self.salt).hexdigest()[:_FINGERPRINT_DIGITS]}"

    @classmethod
    def of(cls, kind: MaskKind, salt: bytes) -> Self:
        """The mask of that kind; ``salt`` is for those that take one."""
        return cls(kind, salt if kind == "sha256" else b"")

    @classmethod
    def of_rule(cls, rule: str, salt: bytes) -> Self:
        """The mask that was recorded as ``rule``; ``redact`` if that can't be told or had.

        A salt other than ours makes other hashes; no value is let out for that.
        """
        kind = rule.partition(":")[0]
        if kind in ("sha256", "redact", "last4"):
            made = cls.of(cast(MaskKind, kind), salt)
            if made.rule == rule:
                return made
        return cls("redact")

    def encoded(self, value: bytes) -> bytes:
        """The mask of a value's text in UTF-8."""
        if self.kind == "sha256":
            return sha256(self.salt + value).hexdigest().encode()
        if self.kind == "redact":
            return _REDACTED
        text = value.decode(errors="replace")
        return _STARS + (text[-_SHOWN:].encode() if len(text) >= _LONG_ENOUGH else b"")

    def text(self, value: str | None) -> str | None:
        """The mask of a value's text."""
        return None if value is None else self.encoded(value.encode()).decode()

    def array(self, values: pa.Array) -> pa.Array:
        """The masks of an array of texts or of their bytes, of the same type."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if self.kind == "redact":
            stars = pa.scalar(_REDACTED).cast(values.type)
            return pc.if_else(pc.is_valid(values), stars, pa.scalar(None, values.type))
        binary = pa.large_binary()
        masked = [None if v is None else self.encoded(v) for v in values.cast(binary).to_pylist()]
        return pa.array(masked, binary).cast(values.type)
