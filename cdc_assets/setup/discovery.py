"""What the patterns of ``tables:`` stand for: the tables that the source has when it is loaded.

The code server, and each command, asks the source. The code server keeps its list in the home: the
process of a run takes it from there, so that it has the same tables, and so does who finds the
source away. A table that comes later waits for the next load (``check`` says ``tables_new``); one
that is gone from the source is out of the configuration then (``table_left``).
"""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import psycopg

from cdc_assets.config.addresses import source_dsn
from cdc_assets.config.collisions import COPY_NAME
from cdc_assets.config.source import SourceConfig
from cdc_assets.config.tables import TableConfig
from cdc_assets.errors import ConfigurationError, EnvironmentProblem, first_line
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.session.connect import LOCK_SECONDS, connect
from cdc_assets.process.home import home, private_folder, write_private
from cdc_assets.readiness.source.left import of_patterns, replicable

_log = logging.getLogger(__name__)

# A code location waits so long for its source to list its tables.
_ANSWER_SECONDS = 20.0


def discovered(config: SourceConfig, *, ask: bool = True, keep: bool = False) -> SourceConfig:
    """The configuration with every table that its patterns stand for; without any it is the same.

    ``ask``: the source, else only if no list of it is kept. ``keep`` the list. Raises
    EnvironmentProblem if the source is away and there is none, ConfigurationError if no table is
    found.
    """
    if not config.patterns:
        return config
    kept = _kept(config)
    if not ask and kept is not None:
        return _with(config, kept)
    try:
        there = _there(config)
    except psycopg.OperationalError as error:
        if kept is None:
            raise EnvironmentProblem(
                f"the tables of source {config.name} can't be listed: {first_line(error)}",
                "Start the source, or correct postgres.dsn; or name each table.",
            ) from error
        _log.warning("%s: the tables that it had are taken, as it is away", config.name)
        return _with(config, kept)
    found = _with(config, there)
    if keep:
        _keep(found)
    return found


def _with(config: SourceConfig, there: Sequence[TableId]) -> SourceConfig:
    """``config`` with those of the tables, but for such that the lake couldn't tell apart."""
    named = {config.lake_name(table.id).lower() for table in config.tables}
    if config.namespace == "health":  # where the source has an asset of its own
        named.add(config.name)
    found, added, alone = set[str](), list[TableConfig](), _of_one_schema(config)
    names = named | {table.name.lower() for table in there}
    for table, entry in of_patterns(config, there).items():
        name = table.name
        if not alone or f"{config.lake.prefix}{name}".lower() in named:
            name = f"{table.schema}_{name}"
        name = config.lake.called(name)
        if not config.lake.catalog.takes(name):
            _log.warning(
                "%s: %s is left out: Glue takes no such name; give it another one, with as:",
                *(config.name, table),
            )
            continue
        if name.lower() in named | found:
            _log.warning(
                "%s: %s is left out: another table has its name in the lake; name it, with as:",
                *(config.name, table),
            )
            continue
        if (copy := COPY_NAME.match(name)) and copy[1].lower() in names:
            _log.warning(
                "%s: %s is left out: a copy of %s may have its name in the lake; name it, with as:",
                *(config.name, table, copy[1]),
            )
            continue
        found.add(name.lower())
        known = {"name": str(table), "as_": name, "found": True}
        added.append(entry.model_copy(update=known))
    if not config.tables and not added:
        if unnamed := [*of_patterns(config, there)]:
            raise ConfigurationError(
                f"tables: the lake takes the name of no table that is found, such as {unnamed[0]}.",
                "Name each of them in tables:, and give it another name there, with as:.",
            )
        listed = ", ".join(entry.name for entry in config.patterns)
        raise ConfigurationError(
            f"tables: the source {config.name} has no table {listed}.",
            "Correct the pattern, or exclude:.",
        )
    return config.model_copy(update={"tables": (*config.tables, *added)})


def _of_one_schema(config: SourceConfig) -> bool:
    """Whether all tables that may ever be found are."""
    found = {table.pattern.only_schema for table in config.patterns if table.pattern is not None}
    return len(found) == 1 and None not in found


def _there(config: SourceConfig) -> list[TableId]:
    """The source's tables. Raises psycopg.OperationalError, also if it doesn't answer in time."""
    found: queue.Queue[list[TableId] | Exception] = queue.Queue()

    def ask() -> None:
        try:
            with connect(
                source_dsn(config), application_name="cdc_assets tables", lock_seconds=LOCK_SECONDS
            ) as source:
                found.put(replicable(source, config))
        except Exception as error:  # noqa: BLE001 - raised where somebody waits
            found.put(error)

    # A server that hangs answers nothing and closes nothing: the thread is left to it.
    threading.Thread(target=ask, name="tables", daemon=True).start()
    try:
        answer = found.get(timeout=_ANSWER_SECONDS)
    except queue.Empty:
        raise psycopg.OperationalError(f"no answer in {_ANSWER_SECONDS:.0f} s") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _file(config: SourceConfig) -> Path:
    return home() / config.name / "tables.json"


def _asked(config: SourceConfig) -> Mapping[str, Sequence[str]]:
    """What a kept list is the answer to."""
    return {
        "patterns": [entry.name for entry in config.patterns],
        "exclude": list(config.exclude),
    }


def _keep(config: SourceConfig) -> None:
    path, listed = _file(config), [table.name for table in config.tables]
    try:
        private_folder(path.parent)
        write_private(path, json.dumps({**_asked(config), "tables": listed}))
    except (OSError, EnvironmentProblem) as error:
        _log.warning("%s: its list of tables can't be kept: %s", config.name, first_line(error))


def _kept(config: SourceConfig) -> list[TableId] | None:
    try:
        kept = json.loads(_file(config).read_text(encoding="utf-8"))
        if {key: kept[key] for key in _asked(config)} != _asked(config):
            return None
        if not isinstance(kept["tables"], list):
            return None
        return [TableId.parse(name) for name in kept["tables"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
