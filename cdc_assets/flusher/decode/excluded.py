"""Which columns of a relation stay in the source: the excluded ones, whatever they are called now.

They are known by their attribute numbers (see ``attribute_numbers``). A column that may be an
excluded one is hidden in any case; if it may be another one as well, values are missing that the
lake wants, and the table has to be set aside.

Pure functions. Who asks the catalog is ``decoder.process``, who parks the table ``session``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cdc_assets.flusher.decode.attribute_numbers import possible
from cdc_assets.flusher.decode.specs import DecodeSpec
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


def hidden(
    spec: DecodeSpec, relation: Relation, now: Sequence[Attribute], *, listed: bool
) -> Hidden:
    """What to leave out of ``relation``, with the catalog as it is now (empty: no such table).

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
