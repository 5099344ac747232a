"""The files of a new source: the YAML, and where both it and the administrator's SQL belong."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from cdc_assets.config.schema import COMPONENT
from cdc_assets.errors import ConfigurationError
from cdc_assets.postgres.names import TableId


@dataclass(frozen=True, slots=True)
class Files:
    """Where a source is written down; ``component``: as a component of a Dagster project."""

    yaml: Path
    sql: Path
    component: bool


def files_of(name: str, output: Path | None, here: Path) -> Files:
    """``output``, or the folder of the Dagster project at ``here``, or a plain file there."""
    if output is not None and output.suffix not in (".yaml", ".yml", ".json"):
        raise ConfigurationError(f"--output {output}: name a file that ends in .yaml.")
    if output is not None:
        component = output.name == "defs.yaml"
        beside = output.with_name("prepare.sql") if component else output.with_suffix(".sql")
        return Files(output, beside, component)
    defs = defs_folder(here)
    if defs is None:
        return Files(here / f"{name}.yaml", here / f"{name}.sql", False)
    return Files(defs / name / "defs.yaml", defs / name / "prepare.sql", True)


def defs_folder(here: Path) -> Path | None:
    """Where the Dagster project at ``here`` has its components, if there is one."""
    try:
        if (here / "dg.toml").is_file():
            settings: Any = tomllib.loads((here / "dg.toml").read_text(encoding="utf-8"))
        else:
            project = tomllib.loads((here / "pyproject.toml").read_text(encoding="utf-8"))
            settings = project["tool"]["dg"]
        settings = settings["project"]
        module = str(settings.get("defs_module") or f"{settings['root_module']}.defs")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    folder = Path(*module.split("."))
    for place in (here / "src" / folder, here / folder):
        if place.is_dir():
            return place
    return None


def text_of(
    name: str,
    tables: Sequence[TableId],
    *,
    component: bool,
    apart: bool,
    schema: str | None = None,
    called: Mapping[TableId, str] = MappingProxyType({}),
) -> str:
    """The YAML of a source whose addresses are in the environment; ``schema``: of its log.

    ``called``: as :func:`cdc_assets.setup.choice.called`.
    """
    variable = name.upper()
    lines = [
        f"name: {name}",
        "postgres: # addresses and passwords come from the environment",
        f'  dsn: "${{{variable}_DSN}}"',
    ]
    if apart:
        lines.append(f'  replication_dsn: "${{{variable}_STREAM_DSN}}"')
    if schema is not None:
        lines.append(f"state: {{schema: {schema}}} # another source has the usual one here")
    lines.append("tables: # names as SQL spells them; a table may have settings, see below")
    for table in tables:
        if table in called:
            lines += [f"  - name: {_scalar(str(table))}", f"    as: {_scalar(called[table])}"]
        else:
            lines.append(f"  - {_scalar(str(table))}")
    lines += [
        "  # - public.* # a pattern takes tables that come later, too",
        "  # - name: public.orders",
        "  #   freshness: {target: 5s, warn: 5m, fail: 15m}",
        "  #   columns: {exclude: [card_number]}",
    ]
    if not component:
        return "\n".join(lines) + "\n"
    indented = [f"  {line}" for line in lines]
    return "\n".join([f"type: {COMPONENT}", "attributes:", *indented]) + "\n"


def _scalar(text: str) -> str:
    """A name as YAML spells it; a ``${`` in it is no reference."""
    text = text.replace("${", "$${")
    dumped = yaml.safe_dump(text, width=10**6, allow_unicode=text.isprintable())
    return dumped.removesuffix("\n").removesuffix("\n...")


def write(path: Path, text: str) -> None:
    """A new file; raises ConfigurationError if there is one, or it can't be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            raise ConfigurationError(
                f"{path} is there already.", "Remove it, or write to another one with --output."
            )
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigurationError(
            f"{path} can't be written: {error.strerror}.", "Write to another one with --output."
        ) from error
