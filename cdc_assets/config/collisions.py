"""What two tables, places or settings of one source may not have in common. Raise ValueError."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

if TYPE_CHECKING:
    from cdc_assets.config.source import SourceConfig

# What a copy beside a lake table is called.
COPY_NAME = re.compile(r"\A(.+)__copy_[0-9]+\Z", re.DOTALL)


def refuse_collisions(config: SourceConfig) -> None:
    """No two entries for one table, and no two tables with one lake table."""
    twice = [name for name, count in Counter(t.name for t in config.tables).items() if count > 1]
    if twice:
        raise ValueError(f"tables: {twice[0]} stands twice; keep one")
    if config.markers.table in {table.name for table in config.tables}:
        raise ValueError(
            f"markers.table: {config.markers.table} stands in tables:, too; its rows are marks, and"
            " no table of the lake"
        )
    if config.markers.table is not None and not config.streams:
        raise ValueError("markers.table: with snapshot.mode snapshot_only nothing is streamed")
    lake: dict[tuple[str, str], str] = {}
    for table in config.tables:
        namespace, name = config.lake_identifier(table.id)
        if (namespace, name) == ("health", config.name):
            raise ValueError(
                f"tables: the lake table health.{name} would have the name of an asset of the"
                " source; give another lake.namespace"
            )
        if not config.lake.catalog.takes(name):
            raise ValueError(
                f"tables: Glue takes lower-case letters, digits and _ in names, and the lake table"
                f" of {table.name} would be {name!r}; give it another name there, with as:"
            )
        other = lake.setdefault((namespace, name.lower()), table.name)
        if other != table.name:
            raise ValueError(
                f"tables: {other} and {table.name} would both become the lake table {name!r};"
                " give one of them another name there, with as:"
            )
    keys: dict[str, str] = {}  # Dagster joins the parts of a key by two underscores
    for (namespace, name), table_name in lake.items():
        if (other := keys.setdefault(f"{namespace}__{name}", table_name)) != table_name:
            raise ValueError(
                f"tables: the lake tables of {other} and {table_name} would be one in Dagster; give"
                " one of them another name there, with as:"
            )
        if (copy := COPY_NAME.match(name)) and (namespace, copy[1]) in lake:
            raise ValueError(
                f"tables: the lake table {name} of {table_name} would have the name of a copy"
                f" of {copy[1]}; give it another one, with as:"
            )


def refuse_adoption(config: SourceConfig) -> None:
    """No lake table is taken over where nothing says from which change on it goes on."""
    if all(table.adopt is None for table in (*config.tables, *config.patterns)):
        return
    if config.log is not None:
        raise ValueError("adopt: with log: a second lake begins with a copy; remove it")
    if not config.streams:
        raise ValueError("adopt: goes with a log; set snapshot.mode: initial or never")
    if config.snapshot.from_ is not None:
        raise ValueError("adopt: doesn't go with snapshot.from; adopt first, or copy first")


def refuse_on_standby(config: SourceConfig) -> None:
    """Nothing that a standby's source would have to write to it, or lock there."""
    if not config.postgres.standby:
        return
    if config.state.postgres_url is None:
        raise ValueError("postgres.standby: a standby takes no writes; give state.postgres_url")
    if config.snapshot.from_ is not None:
        raise ValueError("snapshot.from: with postgres.standby first copies are read there already")
    if "lock" in {config.snapshot.pin, *(table.pin for table in config.tables)}:
        raise ValueError("pin: lock: a standby gives nobody such a lock; take it out")


def refuse_shared_places(config: SourceConfig) -> None:
    """No folder with both staged files and lake tables."""
    uri, warehouse = config.staging.uri, config.lake.catalog.warehouse
    if uri is None or warehouse is None:
        return
    staged = f"{unquote(uri)}/{config.log_name}/"
    for namespace in sorted(config.namespaces):
        tables = f"{warehouse.rstrip('/')}/{namespace}/"
        if staged.startswith(tables) or tables.startswith(staged):
            raise ValueError(
                f"staging.uri: staged files would be in {staged} and lake tables in {tables},"
                " where nobody tells them apart; give another staging.uri, and put this one"
                " into staging.former_uris if it was used"
            )


def refuse_found(data: Any) -> None:
    """Nobody writes what ``setup.discovery`` finds."""
    if isinstance(data, Mapping):
        tables = data.get("tables")
        entries = [data, *(tables if isinstance(tables, list | tuple) else ())]
        if any(isinstance(e, Mapping) and (e.get("patterns") or e.get("found")) for e in entries):
            raise ValueError("patterns and found: unknown keys; remove them")
