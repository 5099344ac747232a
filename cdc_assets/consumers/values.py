"""From staged text to the lake's values, in Arrow: what ``postgres.types`` has Spark SQL do.

A value that the lake's type can't hold follows the column's policy, as it does in the lake.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from decimal import Decimal

import pyarrow as pa

from cdc_assets.errors import TableProblem
from cdc_assets.lake.tables import LakeColumn
from cdc_assets.messages.texts import command
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.types import ELEMENT, Policy, arrow_type

Texts = Sequence[str | None]
_ELEMENT = re.compile(ELEMENT)
_ESCAPED = re.compile(r"(?s)\\(.)")
_BOUNDS = re.compile(r"\A\[[^=]*=")


class _Unfit(Exception):
    """A value has no form in the lake."""


def arrow(table: TableId, column: LakeColumn, texts: Texts) -> pa.Array:
    """The column's values. Raises TableProblem for one that must fit and doesn't."""
    lake, policy = column.mapping.lake, column.policy
    try:
        return _values(lake, texts, policy, shift=not column.is_key)
    except _Unfit as error:
        raise TableProblem(
            table,
            f"column {column.name} got a value that the lake's {lake} can't hold",
            f"Set columns.types: {{{column.source.name}: string}}, and then:"
            f" {command('resync', table)}",
        ) from error


def _values(lake: str, texts: Texts, policy: Policy, *, shift: bool = True) -> pa.Array:
    kind = arrow_type(lake)
    if pa.types.is_list(kind):
        inner = lake.removeprefix("array<").removesuffix(">")
        return _lists(inner, texts, policy, shift=shift)
    if pa.types.is_boolean(kind):
        return pa.array([None if text is None else text == "t" for text in texts], kind)
    if pa.types.is_binary(kind):
        return pa.array([None if t is None else bytes.fromhex(t[2:]) for t in texts], kind)
    if pa.types.is_decimal(kind):
        largest = str(Decimal(10) ** (kind.precision - kind.scale) - Decimal(10) ** -kind.scale)
        texts = _fitted(texts, policy, _number, lambda t: t == "-Infinity", f"-{largest}", largest)
    elif pa.types.is_temporal(kind):
        low, high = "0001-01-01", "9999-12-31"
        if pa.types.is_timestamp(kind):
            low, high = f"{low} 00:00:00", f"{high} 23:59:59.999999"
            if kind.tz is not None:  # '+00' is all that TimeZone=UTC ever prints
                texts = [
                    t and (t[:-3] if t.endswith("+00") else t.replace("+00 ", " ")) for t in texts
                ]
                naive = _fitted(texts, policy, _year, _early, low, high)
                return pa.array(naive, pa.string()).cast(pa.timestamp("us")).cast(kind)
        texts = _fitted(texts, policy, _year, _early, low, high)
    return pa.array(texts, pa.string()).cast(kind)


def _number(text: str) -> bool:
    return text not in ("NaN", "Infinity", "-Infinity")


def _year(text: str) -> bool:
    return text[4:5] == "-" and not text.endswith("BC")


def _early(text: str) -> bool:
    return text.startswith("-") or text.endswith("BC")


def _fitted(
    texts: Texts,
    policy: Policy,
    fits: Callable[[str], bool],
    is_low: Callable[[str], bool],
    low: str,
    high: str,
) -> Texts:
    """``texts``, with what the policy has in the place of those that don't fit."""
    odd = [i for i, text in enumerate(texts) if text is not None and not fits(text)]
    if not odd:
        return texts
    if policy == "fail":
        raise _Unfit
    found = list(texts)
    for i in odd:
        found[i] = None if policy == "null" else (low if is_low(str(texts[i])) else high)
    return found


def _lists(inner: str, texts: Texts, policy: Policy, *, shift: bool) -> pa.Array:
    """One-dimensional array literals; ``shift``: their bounds don't matter."""
    flat, offsets = list[str | None](), list[int | None]()
    for text in texts:
        body = None if text is None else _BOUNDS.sub("", text)
        odd = body is not None and (body.startswith("{{") or (body != text and not shift))
        if odd and policy == "fail":
            raise _Unfit
        if body is None or body.startswith("{{"):
            offsets.append(None)
            continue
        offsets.append(len(flat))
        flat += map(_element, _ELEMENT.findall(body))
    ends = pa.array([*offsets, len(flat)], pa.int32())
    return pa.ListArray.from_arrays(ends, _values(inner, flat, policy), pa.list_(arrow_type(inner)))


def _element(text: str) -> str | None:
    if text == "NULL":
        return None
    return _ESCAPED.sub(r"\1", text[1:-1]) if text.startswith('"') else text
