"""Code references of assets: the line of a table in the configuration file.

The UI links an asset to that line. The file is the one that the source was loaded from, wherever it
is installed; nothing is read again when the UI asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import dagster as dg
import yaml

from cdc_assets.config.source import SourceConfig
from cdc_assets.dagster.names import all_tables
from cdc_assets.postgres.names import TableId

_KEY = "dagster/code_references"


def with_references(defs: dg.Definitions, config: SourceConfig, path: Path) -> dg.Definitions:
    """``defs`` with every asset referring to its table's line of ``path``, or else the source's.

    Unchanged if there is no such file: a component may be made in Python, too.
    """
    if not path.is_file():
        return defs
    whole, by_table = _lines(path.read_text(encoding="utf-8"), config)
    lines = {
        key: by_table[names.table]
        for names in all_tables(config)
        if names.table in by_table
        for key in (
            *(names.source, names.snapshot, names.staged_log),
            *(names.lake, names.maintenance),
        )
    }

    def referring(spec: dg.AssetSpec) -> dg.AssetSpec:
        line = lines.get(spec.key, whole)
        label = "the table's configuration" if spec.key in lines else "the source's configuration"
        reference = dg.LocalFileCodeReference(
            file_path=str(path.absolute()), line_number=line, label=label
        )
        value = dg.CodeReferencesMetadataValue(code_references=[reference])
        return spec.merge_attributes(metadata={_KEY: value})

    return defs.map_asset_specs(func=referring)


def _lines(text: str, config: SourceConfig) -> tuple[int, dict[TableId, int]]:
    """Where the source begins, and each of its tables; a file may have several documents."""
    for document in yaml.compose_all(text, Loader=yaml.SafeLoader):
        parts = _mapping(document)
        attributes = _mapping(parts.get("attributes", document))
        name = attributes.get("name")
        if name is None or name.value != config.name:
            continue
        tables = attributes.get("tables")
        items = tables.value if isinstance(tables, yaml.SequenceNode) else []
        found = {}
        for item in items:
            given = item if isinstance(item, yaml.ScalarNode) else _mapping(item).get("name")
            if isinstance(given, yaml.ScalarNode):
                with suppress(ValueError):  # a template's name is only known to Dagster
                    found[TableId.parse(given.value)] = item.start_mark.line + 1
        return name.start_mark.line + 1, found
    return 1, {}


def _mapping(node: Any) -> Mapping[str, yaml.Node]:
    if not isinstance(node, yaml.MappingNode):
        return {}
    return {key.value: value for key, value in node.value if isinstance(key, yaml.ScalarNode)}
