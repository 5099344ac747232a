"""How each registered table is staged, by what the log knows of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from cdc_assets.log.states import TableState
from cdc_assets.masks import Mask, makes
from cdc_assets.postgres.names import TableId

_OTHER_SALT = "is of columns that are masked with another mask_salt than the flusher's"
Name = TypeVar("Name", str, int)

if TYPE_CHECKING:  # the decoder process has no use for what the log takes: 20 MB, a quarter second
    from cdc_assets.config.source import SourceConfig
    from cdc_assets.log.table_row import TableRow


def staging_specs(rows: Iterable[TableRow], config: SourceConfig) -> dict[int, DecodeSpec]:
    """How each registered table is staged, by oid.

    Parked tables (perhaps for weeks) are left out: only a copy ends that, and it has the changes.
    Tables outside this process's configuration are included: another process may have added and
    pinned one. What this configuration masks is masked, whatever the log says of it: the table is
    then parked or described anew, and until that its values stay in the source. A table whose masks
    this process can't make, as it has another salt, is left out, so that it isn't pinned; one that
    is followed already is staged no further.
    """
    return {
        row.oid: DecodeSpec(
            row.table,
            row.key_columns,
            row.excluded,
            row.excluded_numbers,
            tuple((c.number, c.name, c.type_oid, c.modifier) for c in row.columns),
            doubt="" if _makes(row, config) else _OTHER_SALT,
            masks=tuple((_masks(row.masks, config) | (config.masks(row.table) or {})).items()),
            mask_numbers=tuple(_masks(row.mask_numbers, config).items()),
            filtered=row.filter_wanted is not None,
        )
        for row in rows
        if row.oid and row.state != TableState.PARKED and _is_staged(row, config)
    }


def _is_staged(row: TableRow, config: SourceConfig) -> bool:
    """Not before it is described with the masks that somebody asked for, or that are ours to make.

    What is staged before its pin is of no use.
    """
    waits = row.state == TableState.WAITING and row.snapshot_lsn is None
    if waits and not row.as_wished:
        return False
    return row.followed or _makes(row, config)


def _makes(row: TableRow, config: SourceConfig) -> bool:
    return makes({*row.masks.values(), *row.mask_numbers.values()}, config.salt)


def _masks(rules: Mapping[Name, str], config: SourceConfig) -> dict[Name, Mask]:
    return {name: Mask.of_rule(rule, config.salt) for name, rule in rules.items()}


@dataclass(frozen=True, slots=True)
class DecodeSpec:
    """How a table is staged: its name, the columns that find a row, those that are left out.

    Names are those of ``columns``, which were the table's once: number, name, type's oid and
    modifier. ``excluded_numbers``: attribute numbers of excluded columns, as far as known.
    ``masks``: of columns by name, and ``mask_numbers`` by attribute number as far as known.
    ``filtered``: whether the table has a row filter, which makes inserts of some updates.

    ``decoder_process.loop`` replaces the names by a relation's own; ``doubt`` is then why its key
    can't be determined, or empty.
    """

    table: TableId
    key_columns: tuple[str, ...]
    excluded: frozenset[str] = frozenset()
    excluded_numbers: frozenset[int] = frozenset()
    columns: tuple[tuple[int, str, int, int], ...] = ()
    doubt: str = ""
    masks: tuple[tuple[str, Mask], ...] = ()
    mask_numbers: tuple[tuple[int, Mask], ...] = ()
    filtered: bool = False
