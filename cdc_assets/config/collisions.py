"""What two tables, or two places, of one source may not have in common. Raise ValueError."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING
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
    lake: dict[tuple[str, str], str] = {}
    for table in config.tables:
        namespace, name = config.lake_identifier(table.id)
        if (namespace, name) == ("health", config.name):
            raise ValueError(
                f"tables: the lake table health.{name} would have the name of an asset of the"
                " source; give another lake.namespace"
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


def refuse_shared_places(config: SourceConfig) -> None:
    """No folder with both staged files and lake tables."""
    uri, warehouse = config.staging.uri, config.lake.catalog.warehouse
    if uri is None or warehouse is None:
        return
    staged = f"{unquote(uri)}/{config.name}/"
    for namespace in sorted(config.namespaces):
        tables = f"{warehouse.rstrip('/')}/{namespace}/"
        if staged.startswith(tables) or tables.startswith(staged):
            raise ValueError(
                f"staging.uri: staged files would be in {staged} and lake tables in {tables},"
                " where nobody tells them apart; give another staging.uri, and put this one"
                " into staging.former_uris if it was used"
            )
