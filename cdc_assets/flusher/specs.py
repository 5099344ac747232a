"""How each registered table is staged, by what the log knows of it."""

from __future__ import annotations

from collections.abc import Iterable

from cdc_assets.flusher.staged_rows import DecodeSpec
from cdc_assets.log.tables import TableRow


def staging_specs(rows: Iterable[TableRow]) -> dict[int, DecodeSpec]:
    """How each registered table is staged, by oid.

    Not those that are parked, perhaps for weeks: only a copy ends that, and it has the changes. All
    that are registered, not those of this process's configuration: another process may have
    added one, and pinned it.
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
        if row.oid and row.state != "parked"
    }
