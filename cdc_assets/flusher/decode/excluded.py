"""Columns of a relation that stay in the source: the excluded ones, under any name.

They are known by their attribute numbers (see ``attribute_numbers``). A column that may be an
excluded one is hidden in any case. If it may also be another one, values that the lake wants are
missing, and the table has to be parked.

Pure functions. ``decoder_process.loop`` asks the catalog, ``registrar`` parks the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cdc_assets.flusher.decode.attribute_numbers import possible
from cdc_assets.flusher.decode.specs import DecodeSpec
from cdc_assets.postgres.pgoutput import Relation

if TYPE_CHECKING:  # it imports psycopg, which few decoders need
    from cdc_assets.postgres.catalog import Attribute


@dataclass(frozen=True, slots=True)
class Hidden:
    """Columns of a relation that aren't staged.

    ``names``: in this relation. ``numbers``: all known attribute numbers of excluded columns.
    ``doubtful``: those of ``names`` that may be wanted columns.
    """

    names: frozenset[str]
    numbers: frozenset[int]
    doubtful: tuple[str, ...] = ()


def hidden(
    spec: DecodeSpec, relation: Relation, now: Sequence[Attribute], *, listed: bool
) -> Hidden:
    """The columns to leave out of ``relation``; ``now``: the catalog (empty: no such table).

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
    return Hidden(frozenset(names), frozenset(numbers), tuple(doubtful))
