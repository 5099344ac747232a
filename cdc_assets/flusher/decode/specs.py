"""How each registered table is staged, by what the log knows of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cdc_assets.log.states import TableState
from cdc_assets.postgres.names import TableId

if TYPE_CHECKING:  # the decoder process has no use for what the log takes: 20 MB, a quarter second
    from cdc_assets.log.tables import TableRow


def staging_specs(rows: Iterable[TableRow]) -> dict[int, DecodeSpec]:
    """How each registered table is staged, by oid.

    Parked tables (perhaps for weeks) are left out: only a copy ends that, and it has the changes.
    Tables outside this process's configuration are included: another process may have added and
    pinned one.
    """
    return {
        row.oid: DecodeSpec(
            row.table,
            row.key_columns,
            row.excluded,
            row.excluded_numbers,
            tuple((c.number, c.name, c.type_oid, c.modifier) for c in row.columns),
        )
        for row in rows
        if row.oid and row.state != TableState.PARKED
    }


@dataclass(frozen=True, slots=True)
class DecodeSpec:
    """How a table is staged: its name, the columns that find a row, those that are left out.

    Names are those of ``columns``, which were the table's once: number, name, type's oid and
    modifier. ``excluded_numbers``: attribute numbers of excluded columns, as far as known.

    ``decoder_process.loop`` replaces the names by a relation's own; ``doubt`` is then why its key
    can't be determined, or empty.
    """

    table: TableId
    key_columns: tuple[str, ...]
    excluded: frozenset[str] = frozenset()
    excluded_numbers: frozenset[int] = frozenset()
    columns: tuple[tuple[int, str, int, int], ...] = ()
    doubt: str = ""
