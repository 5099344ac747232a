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
from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import ConfigurationError, EnvironmentProblem, first_line
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.session.connect import LOCK_SECONDS, connect
from cdc_assets.process.home import home, private_folder, write_private
from cdc_assets.readiness.source.left import lake_names, of_patterns, replicable

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
    stood = of_patterns(config, there)
    called, unnamed = lake_names(config, stood, there)
    for table, why in unnamed.items():
        _log.warning("%s: %s is left out: %s, with as:", config.name, table, why)
    added = [
        stood[table].model_copy(update={"name": str(table), "as_": name, "found": True})
        for table, name in called.items()
    ]
    if not config.tables and not added:
        if unnamed:
            raise ConfigurationError(
                "tables: the lake takes the name of no table that is found, such as"
                f" {next(iter(unnamed))}.",
                "Name each of them in tables:, and give it another name there, with as:.",
            )
        listed = ", ".join(entry.name for entry in config.patterns)
        raise ConfigurationError(
            f"tables: the source {config.name} has no table {listed}.",
            "Correct the pattern, or exclude:.",
        )
    return config.model_copy(update={"tables": (*config.tables, *added)})


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
