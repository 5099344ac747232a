"""Columns of a relation whose values stay in the source, under any name: excluded and masked ones.

They are known by their attribute numbers (see ``attribute_numbers``). A column that may be an
excluded one is hidden in any case; so is one that may be a masked one and another. If it may also
be a column as it is, values that the lake wants are missing, and the table has to be parked.

Pure functions. ``decoder_process.loop`` asks the catalog, ``registrar`` parks the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cdc_assets.flusher.decode.attribute_numbers import possible
from cdc_assets.flusher.decode.specs import DecodeSpec
from cdc_assets.masks import Mask
from cdc_assets.postgres.pgoutput import Relation

if TYPE_CHECKING:  # it imports psycopg, which few decoders need
    from cdc_assets.postgres.catalog import Attribute


@dataclass(frozen=True, slots=True)
class Hidden:
    """Columns of a relation that aren't staged, or not as they are.

    ``names``: those that aren't staged, in this relation. ``numbers``: all known attribute numbers
    of excluded columns. ``doubtful``: those of ``names`` that may be wanted columns. ``masks``: by
    name in this relation; ``mask_numbers``: by attribute number, all that are known.
    """

    names: frozenset[str]
    numbers: frozenset[int]
    doubtful: tuple[str, ...] = ()
    masks: tuple[tuple[str, Mask], ...] = ()
    mask_numbers: tuple[tuple[int, Mask], ...] = ()


def hidden(
    spec: DecodeSpec, relation: Relation, now: Sequence[Attribute], *, listed: bool
) -> Hidden:
    """The columns to leave out of ``relation``, or to mask; ``now``: the catalog, maybe empty.

    ``listed``: whether the publication lists the table's columns.
    """
    told = [column.name for column in relation.columns]
    maybe = possible(spec, relation, now, listed=listed)
    by_name = [name in spec.excluded for name in told]
    learnt = {
        min(one) for one, named in zip(maybe, by_name, strict=True) if named and len(one) == 1
    }
    numbers = spec.excluded_numbers | learnt
    names, doubtful = set(spec.excluded), list[str]()
    for name, one, named in zip(told, maybe, by_name, strict=True):
        if named or (one and not one & numbers):
            continue
        names.add(name)
        if not one or one - numbers:
            doubtful.append(name)
    by_column, known = dict(spec.masks), dict(spec.mask_numbers)
    for name, one in zip(told, maybe, strict=True):
        if name in by_column and len(one) == 1:
            known.setdefault(min(one), by_column[name])
    masks = dict[str, Mask]()
    for name, one in zip(told, maybe, strict=True):
        if name in names or not (by_column or known):
            continue
        found = {known[number] for number in one & known.keys()}
        if name in by_column:
            found.add(by_column[name])
        elif (found and len(one) > 1) or not one:
            names.add(name)
            doubtful.append(name)
            continue
        if found:  # of two that differ neither may be let out
            masks[name] = found.pop() if len(found) == 1 else Mask("redact")
    return Hidden(
        frozenset(names),
        frozenset(numbers),
        tuple(doubtful),
        tuple(masks.items()),
        tuple(known.items()),
    )
