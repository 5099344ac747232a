"""Which columns of a relation stay in the source: the excluded ones, whatever they are called now.

A Relation message names columns without their attribute numbers, which alone a rename keeps; the
catalog has them, but may be ahead of the stream. So a relation is held against what was known of
the table and against the catalog: is it one of the two, so are its numbers. If it is neither, any
reading that the rules allow counts: numbers rise, a live column was sent if a later one was. A
column that may be an excluded one is hidden in any case; if it may be another one as well, values
are missing that the lake wants, and the table has to be set aside.

Pure functions. Who asks the catalog is ``decoder_process``, who parks the table ``receiver``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cdc_assets.flusher.staged_rows import DecodeSpec
from cdc_assets.postgres.pgoutput import Relation

if TYPE_CHECKING:  # it takes psycopg along, which few decoders need
    from cdc_assets.postgres.catalog import Attribute


@dataclass(frozen=True, slots=True)
class Hidden:
    """What of a relation isn't staged.

    ``names``: in this relation. ``numbers``: all that are known of excluded columns. ``doubtful``:
    those of ``names`` that may be a column that is wanted.
    """

    names: frozenset[str]
    numbers: frozenset[int]
    doubtful: tuple[str, ...] = ()


def hidden(spec: DecodeSpec, relation: Relation, now: Sequence[Attribute]) -> Hidden:
    """What to leave out of ``relation``, with the catalog as it is now (empty: no such table)."""
    told = [(c.name, c.type_oid, c.type_modifier) for c in relation.columns]
    readings = [
        [number for number, *_ in columns]
        for columns in (spec.columns, *_sent(now))
        if [tuple(rest) for _, *rest in columns] == told
    ]
    maybe = (
        [set(numbers) for numbers in zip(*readings, strict=True)]
        if readings
        else _possible(len(told), now)
    )
    by_name = [name in spec.excluded for name, *_ in told]
    learnt = {
        min(one) for one, named in zip(maybe, by_name, strict=True) if named and len(one) == 1
    }
    numbers = spec.excluded_numbers | learnt
    names, doubtful = set(spec.excluded), list[str]()
    for (name, *_), possible, named in zip(told, maybe, by_name, strict=True):
        if named or (possible and not possible & numbers):
            continue
        names.add(name)
        if not possible or possible - numbers:
            doubtful.append(name)
    return Hidden(frozenset(names), frozenset(numbers), tuple(doubtful))


def _sent(now: Sequence[Attribute]) -> list[list[tuple[int, str, int, int]]]:
    """The columns that are sent as of now, without generated ones and with stored ones."""
    return [
        [(a.number, a.name, a.type_oid, a.modifier) for a in now if not a.dropped and ok(a)]
        for ok in (lambda a: not a.generated, lambda a: a.generated != "v")
    ]


def _possible(count: int, now: Sequence[Attribute]) -> list[set[int]]:
    """The attribute numbers that each of so many told columns may have; empty sets: none fits."""
    # before[i]: whether i columns may be among the attributes so far. What isn't among them though
    # it comes before one that is, was dropped since, or isn't sent.
    may_skip = [a.dropped or bool(a.generated) for a in now]
    before = [{0}]
    for skip in may_skip:
        before.append({i + 1 for i in before[-1]} | (before[-1] if skip else set()))
    after = [{count}]  # whatever follows the last one was added later
    for skip in reversed(may_skip):
        after.append({i - 1 for i in after[-1]} | (after[-1] if skip else set()) | {count})
    after.reverse()
    found = [set[int]() for _ in range(count)]
    for place, a in enumerate(now):
        for i in before[place]:
            if i < count and i + 1 in after[place + 1]:
                found[i].add(a.number)
    return found
