"""Which of a database's tables a new source replicates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from cdc_assets.config.patterns import TablePattern, matching
from cdc_assets.errors import ConfigurationError
from cdc_assets.postgres.names import TableId
from cdc_assets.setup.inventory import Listed

# Obstacles that the administrator's SQL takes away. One of them costs WAL from then on, so a table
# that has it is taken only if it is named.
GRANTED, ALTERED = "select_privilege", "replica_identity"


@dataclass(frozen=True, slots=True)
class Choice:
    """``left``: tables that were meant, too, but that something is in the way of."""

    tables: tuple[TableId, ...]
    left: tuple[TableId, ...]


def free(found: Sequence[Listed]) -> list[TableId]:
    """The tables that nothing stands in the way of, but a right that the SQL grants."""
    return [t.id for t in found if all(f.code == GRANTED for f in t.obstacles)]


def called(tables: Sequence[TableId]) -> dict[TableId, str]:
    """Names in the lake for tables that would have another one's there, whatever their case.

    Tables of one name in several schemas have the schema's in front. It is written down, so that no
    table has another name in the lake once one of them is taken out.
    """
    alike = Counter(table.name.lower() for table in tables)
    plain = {t: f"{t.schema}_{t.name}" if alike[t.name.lower()] > 1 else t.name for t in tables}
    wanted, taken, found = {name.lower() for name in plain.values()}, set[str](), {}
    for table, name in plain.items():
        if name.lower() in taken:
            found[table] = next(
                other
                for number in count(2)
                if (other := f"{name}_{number}").lower() not in wanted | taken
            )
        elif name != table.name:
            found[table] = name
        taken.add(found.get(table, name).lower())
    return found


def choose(found: Sequence[Listed], wanted: Sequence[str], exclude: Sequence[str]) -> Choice:
    """``wanted``: names and patterns; none are all tables. A pattern leaves out what can't be.

    Raises ConfigurationError for a name that there is none of, or that can't be replicated.
    """
    tables = [table.id for table in found]
    try:
        asked = [TablePattern.parse(text) for text in wanted]
        unwanted = [TablePattern.parse(text) for text in exclude]
    except ValueError as error:
        raise ConfigurationError(f"{error}.") from error
    meant, idle = matching(asked, tables) if asked else (tables, [])
    excluded, useless = matching(unwanted, tables)
    without = {*excluded}
    idle += [p.text for p in unwanted if p.is_name and p.text in useless]
    if idle:
        raise ConfigurationError(
            f"the database has no table {', '.join(idle)}.", "Correct the name, or its schema."
        )
    named = {*matching((pattern for pattern in asked if pattern.is_name), tables)[0]}
    refused = [
        f"{listed.id}: {finding.message.removeprefix(f'{listed.id}: ')} {finding.remedy}".rstrip()
        for listed in found
        for finding in listed.obstacles
        if listed.id in named and finding.code not in (GRANTED, ALTERED)
    ]
    if refused:
        raise ConfigurationError("\n".join(["can't be replicated as it is:", *refused]))
    able = {*free(found), *named}
    meant = [table for table in meant if table not in without]
    chosen = tuple(table for table in meant if table in able)
    if not chosen:
        raise ConfigurationError("no table is left to replicate.")
    return Choice(chosen, tuple(table for table in meant if table not in able))
