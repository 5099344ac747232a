"""Which attribute numbers the columns of a relation have.

A Relation message names columns without their attribute numbers, but only the numbers survive a
rename. The catalog has them, but may be ahead of the stream. So a relation is compared with what
was known of the table and with the catalog. If it equals either, that one's numbers apply. If it
equals neither, every reading that the rules allow counts: numbers rise, and a live column was sent
if a later one was.

Pure functions. ``decoder_process.loop`` asks the catalog.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cdc_assets.flusher.decode.specs import DecodeSpec
from cdc_assets.postgres.pgoutput import Relation

if TYPE_CHECKING:  # it imports psycopg, which few decoders need
    from cdc_assets.postgres.catalog import Attribute


def possible(
    spec: DecodeSpec, relation: Relation, now: Sequence[Attribute], *, listed: bool
) -> list[set[int]]:
    """The numbers that each column of ``relation`` may have; empty sets: none fits.

    ``now`` is the catalog of the table, empty if there is no such table any more. ``listed``:
    whether the publication has a column list for the table, which may leave out excluded columns.
    """
    sent = _columns(relation)
    unsent = spec.excluded_numbers - {number for number, *_ in spec.columns} if listed else set()
    withheld = [a for a in now if a.number in unsent]
    readings = [
        [number for number, *_ in columns]
        for columns in (spec.columns, *_sent(now), *_sent([a for a in now if a not in withheld]))
        if [tuple(rest) for _, *rest in columns] == sent
    ]
    if readings:
        return [set(numbers) for numbers in zip(*readings, strict=True)]
    return _allowed(len(sent), now, withheld)


def is_as_known(spec: DecodeSpec, relation: Relation) -> bool:
    """Whether the columns are those of the spec, as far as a relation says."""
    return [tuple(rest) for _, *rest in spec.columns] == _columns(relation)


def key_of(
    spec: DecodeSpec, relation: Relation, now: Sequence[Attribute], *, listed: bool
) -> tuple[tuple[str, ...], str]:
    """Names of the spec's key columns in ``relation``, and why they can't be determined, or "".

    There are none if a column of the key was dropped: then the table has no key any more.
    """
    number_of = {name: number for number, name, *_ in spec.columns}
    key = [number_of.get(name, 0) for name in spec.key_columns]
    numbers = possible(spec, relation, now, listed=listed)
    names = list[str]()
    for number in key:
        at = [place for place, maybe in enumerate(numbers) if number in maybe]
        if len(at) > 1 or any(len(numbers[place]) > 1 for place in at) or not all(numbers):
            return (), "came after its schema had changed too often to tell which its key is"
        names += [relation.columns[place].name for place in at]
    return (tuple(names) if len(names) == len(key) else ()), ""


def _columns(relation: Relation) -> list[tuple[str, int, int]]:
    return [(c.name, c.type_oid, c.modifier) for c in relation.columns]


def _sent(now: Sequence[Attribute]) -> list[list[tuple[int, str, int, int]]]:
    """The columns sent as of now: first without generated ones, then with stored ones."""
    return [
        [(a.number, a.name, a.type_oid, a.modifier) for a in now if not a.dropped and ok(a)]
        for ok in (lambda a: not a.generated, lambda a: a.generated != "v")
    ]


def _allowed(count: int, now: Sequence[Attribute], withheld: Sequence[Attribute]) -> list[set[int]]:
    """The attribute numbers that the rules allow for each of ``count`` columns."""
    # before[place]: how many columns may be among the attributes before that place. An attribute
    # that wasn't sent although a later one was, was dropped since or is never sent.
    may_skip = [a.dropped or bool(a.generated) or a in withheld for a in now]
    before = [{0}]
    for skip in may_skip:
        before.append({i + 1 for i in before[-1]} | (before[-1] if skip else set()))
    after = [{count}]  # attributes after the last column were added later
    for skip in reversed(may_skip):
        after.append({i - 1 for i in after[-1]} | (after[-1] if skip else set()) | {count})
    after.reverse()
    found = [set[int]() for _ in range(count)]
    for place, a in enumerate(now):
        for i in before[place]:
            if i < count and i + 1 in after[place + 1]:
                found[i].add(a.number)
    return found
