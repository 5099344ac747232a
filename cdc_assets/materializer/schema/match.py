"""From one relation to the next: matching columns, and the changes that the lake can follow.

A Relation message names columns without their attribute numbers, and the catalog may be ahead of
the log. But numbers only ever grow, columns are sent in their order, a column that the source still
has was there all the time since it was added, and a number is never used twice. So only few ways to
number the message's columns are possible; the one that agrees best with the names before and now is
taken. If two are equally good and differ in a column that still exists, nothing is guessed.

Pure functions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from cdc_assets.log.relation import Told
from cdc_assets.postgres.catalog import Attribute, Column
from cdc_assets.postgres.pgoutput import RelationColumn

_NUMERIC = re.compile(r"\Anumeric\((\d+),(-?\d+)\)\Z")
_VARYING = re.compile(r"\Acharacter varying(?:\((\d+)\))?\Z")
# By oid: int2, int4, int8; float4, float8; varchar, text; numeric.
_WIDENINGS = {
    *((21, 23), (21, 20), (23, 20), (700, 701)),
    *((1043, 25), (1043, 1043), (1700, 1700)),
}
_INTEGERS = ("smallint", "integer", "bigint")


class Ambiguous(Exception):
    """Two readings of a relation are equally good; the message names the column."""


def numbered(
    known: Sequence[Column], told: Told, now: Sequence[Attribute], newest: int
) -> list[int]:
    """The attribute number of each column of ``told``.

    ``known``: the columns as of the relation before; ``newest``: the highest number that any had by
    then. ``now``: the source's catalog, which may be ahead. Raises Ambiguous.
    """
    before = {c.number: c for c in known}
    first, last = (_align(before, told.columns, now, newest, eager) for eager in (True, False))
    if first is None or last is None:
        raise Ambiguous("the source's catalog doesn't fit the log")
    gone = {a.number for a in now if a.dropped}
    for column, one, other in zip(told.columns, first, last, strict=True):
        # If both columns are gone by now, either will do: they can't be compared any more.
        if one != other and not {one, other} <= gone:
            raise Ambiguous(f"column {column.name} may be one of two")
    return first


def _align(
    before: dict[int, Column],
    told: Sequence[RelationColumn],
    now: Sequence[Attribute],
    newest: int,
    eager: bool,
) -> list[int] | None:
    """The cheapest ascending assignment; of equally cheap ones the ``eager`` one matches early."""
    many, each = len(told), len(now)
    best = [[math.inf] * (each + 1) for _ in range(many + 1)]
    matched = [[False] * (each + 1) for _ in range(many + 1)]
    best[many][each] = 0
    for j in range(each - 1, -1, -1):
        a = now[j]
        known = before.get(a.number)
        born = known is not None or a.number > newest
        for i in range(many, -1, -1):
            take = math.inf
            if i < many and born:
                take = _cost(told[i], known, a) + best[i + 1][j + 1]
            may_skip = a.dropped or bool(a.generated) or not born or (known is None and i == many)
            skip = best[i][j + 1] if may_skip else math.inf
            best[i][j] = min(take, skip)
            matched[i][j] = take < skip or (eager and take == skip and take < math.inf)
    if math.isinf(best[0][0]):
        return None
    found, i = list[int](), 0
    for j in range(each):
        if matched[i][j]:
            found.append(now[j].number)
            i += 1
    return found


def _cost(told: RelationColumn, known: Column | None, now: Attribute) -> int:
    """How little a column of the log resembles one of the catalog; the name counts for more."""
    named = told.name == (known.name if known else None) or (
        not now.dropped and told.name == now.name
    )
    types = {(known.type_oid, known.modifier)} if known else set[tuple[int, int]]()
    if not now.dropped:
        types.add((now.type_oid, now.modifier))
    cost = 0 if named else 2
    if not types or (told.type_oid, told.modifier) in types:
        return cost
    near = {(oid, told.type_oid) for oid, _ in types} | {(told.type_oid, oid) for oid, _ in types}
    if not near & _WIDENINGS:
        return cost + 3
    # A wider type with the same name costs 1: it may be another column. With another name it costs
    # no more: columns often change to such a type, so it proves nothing.
    return cost + 1 if named else cost


def same_values(before: str, after: str, *, as_text: bool) -> bool:
    """Whether a change of type keeps every value in the lake as it is, maybe in a wider type.

    ``as_text``: the lake keeps the text form. Types are ``format_type``'s spelling.
    """
    if before == after or (before in _INTEGERS and after in _INTEGERS):
        return True
    if (before, after) == ("real", "double precision"):
        return not as_text
    one, other = _NUMERIC.match(before), _NUMERIC.match(after)
    if one and other:
        return one[2] == other[2]  # Postgres refuses what doesn't fit
    varying = _VARYING.match(before)
    if after == "text":
        return varying is not None
    wider = _VARYING.match(after)
    if wider and (varying or before == "text"):
        # A shorter type may cut trailing blanks off.
        longest = int(varying[1]) if varying and varying[1] else math.inf
        return int(wider[1]) >= longest if wider[1] else True
    return False
