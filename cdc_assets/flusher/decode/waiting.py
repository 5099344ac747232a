"""Changes that wait to be staged, and their decoding: tables of one layout are decoded together.

A columnar decode has a fixed cost of about a millisecond, which a few hundred changes of one table
don't pay for. Tables of one layout (partitions, a schema for each customer) are read as if they
were one, and the result is cut where one ends and the next one begins. Elsewhere: how a change is
read (``rows``), and where its rows go (``stage.staging``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

import pyarrow as pa

from cdc_assets.errors import ReplicationProblem
from cdc_assets.flusher.decode.changes import Changes, batches, joined
from cdc_assets.flusher.decode.rows import Plan, Unusable, invalid_text
from cdc_assets.flusher.decode.specs import DecodeSpec
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.pgoutput import Relation


@dataclass(slots=True)
class Pending:
    """Waiting changes of one table under one relation, in order: runs of changes and truncates.

    ``unusable``: why some of them were left out, once they were decoded.
    """

    spec: DecodeSpec
    relation: Relation
    parts: list[Changes | pa.Table] = field(default_factory=list)
    unusable: Unusable | None = None

    @property
    def table(self) -> TableId:
        return self.spec.table

    @property
    def byte_size(self) -> int:
        """Of the messages and of what surrounds them, about."""
        return sum(part.nbytes for part in self.parts)


def decoded(pendings: Sequence[Pending]) -> Iterator[tuple[int, pa.Table]]:
    """Staged rows in tables of bounded size, each with the number of its pending.

    Tables of one pending come together, in commit order; the order of pendings is undefined. No
    reference to a taken table is kept. A pending's batch with a change that can't be staged is left
    out; ``unusable`` is why. Raises ReplicationProblem if a message doesn't match its relation.
    """
    plans = [Plan(pending.spec, pending.relation) for pending in pendings]
    alike: dict[object, list[int]] = {}
    for number, plan in enumerate(plans):
        alike.setdefault(plan.layout, []).append(number)
    for numbers in alike.values():
        width = len(plans[numbers[0]].names)
        parts = ((number, part) for number in numbers for part in pendings[number].parts)
        for undecoded, run in groupby(parts, key=lambda part: isinstance(part[1], Changes)):
            if undecoded:
                yield from _rows(plans, pendings, width, run)
            else:
                yield from run


def _rows(
    plans: Sequence[Plan],
    pendings: Sequence[Pending],
    width: int,
    parts: Iterable[tuple[int, Changes]],
) -> Iterator[tuple[int, pa.Table]]:
    """The rows of changes, each with the number of its plan; the plans have one layout."""
    for batch in batches(parts, width):
        owners = [
            (owner, [piece for _, piece in pieces])
            for owner, pieces in groupby(batch, key=itemgetter(0))
        ]
        together = _together(plans[owners[0][0]], owners) if len(owners) > 1 else None
        if together is not None:
            yield from together
            continue
        for owner, pieces in owners:
            alone = _alone(plans[owner], pendings[owner], pieces)
            while alone:
                yield owner, alone.pop()


def _alone(plan: Plan, pending: Pending, pieces: Sequence[Changes]) -> list[pa.Table]:
    """The rows of one owner; nothing if they can't be staged, which is noted."""
    try:
        return [plan.rows(joined(pieces))[0]]
    except Unusable as unusable:
        if pending.unusable is None:
            pending.unusable = unusable
        pending.unusable.commit_lsn = unusable.commit_lsn
        return []


def _together(
    plan: Plan, owners: Sequence[tuple[int, Sequence[Changes]]]
) -> list[tuple[int, pa.Table]] | None:
    """The rows of each owner; None if something is odd, so that its owner has to be found."""
    try:
        rows, ends = plan.rows(joined([piece for _, pieces in owners for piece in pieces]))
    except (ReplicationProblem, Unusable):
        return None
    if invalid_text(rows):
        return None
    found, changes, low = [], 0, 0
    for owner, pieces in owners:
        changes += sum(len(piece.stop) for piece in pieces)
        high = int(ends[changes - 1])
        found.append((owner, rows.slice(low, high - low)))
        low = high
    return found
