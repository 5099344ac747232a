"""Backfills, as the commands, jobs, and rows of the table ``signals`` ask for them.

A signal is a row that anybody may write who has the right to, as with Debezium: its kind says what
is asked for, and its outcome what came of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from threading import Event
from typing import Any, Literal

from pyspark.sql import SparkSession

from cdc_assets.backfill.carry_out import carry_out
from cdc_assets.backfill.request import request
from cdc_assets.config.addresses import selected
from cdc_assets.errors import CdcError, ConfigurationError, first_line
from cdc_assets.flusher.reach import reach
from cdc_assets.log import backfills as record
from cdc_assets.log.backfills import Backfill, State
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId

logger = logging.getLogger(__name__)

Wish = Literal["pause", "resume", "stop"]
_BECOMES: Mapping[Wish, State] = {"pause": "paused", "resume": "requested", "stop": "stopped"}
_LOOK_SECONDS = 1.0
_KEPT_DAYS = 90


def backfill(
    pipeline: Pipeline,
    session: SparkSession,
    number: int,
    on_progress: Callable[[str], None],
    stop: Event | None = None,
) -> Backfill:
    """Carry a backfill out, or wait while another process does; until it ends, or is paused.

    Returned, too, once ``stop`` is set: then it is still to be carried out. Raises CdcError if it
    fails here.
    """
    stop = stop or Event()
    while True:
        done = carry_out(pipeline, session, number, partial(reach, pipeline), on_progress, stop)
        if done.has_ended or done.state == "paused" or stop.wait(_LOOK_SECONDS):
            return done


def wish(pipeline: Pipeline, what: Wish, number: int) -> Backfill:
    """Pause a backfill, resume or stop it. Raises ConfigurationError if it can't be by now."""
    store = pipeline.store
    if not record.become(store, number, _BECOMES[what]):
        now = record.backfill(store, number)
        is_so = now.state == _BECOMES[what] or (what == "resume" and now.state == "running")
        if not is_so:
            raise ConfigurationError(f"backfill {number} can't {what}: it is {now.state}.")
    return record.backfill(store, number)


# --- signals ---


def take_signals(pipeline: Pipeline) -> int:
    """Do what the new rows of ``signals`` ask for; how many there were."""
    store = pipeline.store
    rows = store.connection.execute(
        "select id, kind, data from signals where source = %s and done_at is null"
        " order by requested_at, id",
        (store.source,),
    ).fetchall()
    if rows:
        store.connection.execute(
            "delete from signals where source = %s and done_at < now() - make_interval(days => %s)",
            (store.source, _KEPT_DAYS),
        )
    for key, kind, data in rows:
        # Whoever else takes it at this moment finds it done.
        with store.connection.transaction():
            taken = store.connection.execute(
                "update signals set done_at = clock_timestamp() where source = %s and id = %s"
                " and done_at is null",
                (store.source, key),
            )
            if not taken.rowcount:
                continue
            try:
                with store.connection.transaction():
                    outcome = _do(pipeline, str(kind), data, f"signal {key}")
            except (CdcError, ValueError) as problem:
                outcome = f"refused: {first_line(problem)}"
            store.connection.execute(
                "update signals set outcome = %s where source = %s and id = %s",
                (outcome, store.source, key),
            )
        logger.info("signal %s (%s): %s", key, kind, outcome)
    return len(rows)


def _do(pipeline: Pipeline, kind: str, data: Any, by: str) -> str:
    if not isinstance(data, Mapping):
        raise ConfigurationError("its data isn't a JSON object.")
    match kind:
        case "execute-snapshot":
            return _execute(pipeline, data, by)
        case "pause-snapshot" | "resume-snapshot" | "stop-snapshot":
            return _wished(pipeline, kind.partition("-")[0], data)  # type: ignore[arg-type]
        case "log":
            logger.warning("%s: %s", by, data.get("message", ""))
            return "logged"
    raise ConfigurationError(
        f"{kind} is no kind of signal.",
        "Kinds are execute-snapshot, pause-snapshot, resume-snapshot, stop-snapshot and log.",
    )


def _execute(pipeline: Pipeline, data: Mapping[str, Any], by: str) -> str:
    """``data-collections``: tables; ``additional-conditions``: of some, which of their rows."""
    if (kind := str(data.get("type", "incremental")).lower()) != "incremental":
        raise ConfigurationError(f"type {kind} is not known.", "A backfill is incremental.")
    where = dict[TableId, str]()
    for condition in _list(data, "additional-conditions"):
        if not isinstance(condition, Mapping) or {"data-collection", "filter"} - set(condition):
            raise ConfigurationError(
                "an element of additional-conditions isn't an object with data-collection and"
                " filter."
            )
        [table] = selected(pipeline.config, [str(condition["data-collection"])])
        where[table] = str(condition["filter"])
    tables = _tables(pipeline, data)
    if not tables:
        raise ConfigurationError("data-collections names no table.")
    if unnamed := where.keys() - set(tables):
        raise ConfigurationError(f"data-collections lacks {min(map(str, unnamed))}.")
    replaces = bool(data.get("replace", False))
    made = [
        request(pipeline, table, where.get(table), replaces=replaces, by=by) for table in tables
    ]
    return ", ".join(f"backfill {one.number} of {one.table}" for one in made)


def _wished(pipeline: Pipeline, what: Wish, data: Mapping[str, Any]) -> str:
    """``backfill``: its number; or those of ``data-collections``; or all that may."""
    if "backfill" in data:
        number = int(data["backfill"])
        return f"backfill {number} is {wish(pipeline, what, number).state}"
    tables = _tables(pipeline, data)
    done = [
        f"backfill {one.number} is {_BECOMES[what]}"
        for one in record.backfills(pipeline.store)
        if (not tables or one.table in tables)
        and record.become(pipeline.store, one.number, _BECOMES[what])
    ]
    return ", ".join(done) or f"there was none to {what}"


def _tables(pipeline: Pipeline, data: Mapping[str, Any]) -> list[TableId]:
    names = [str(name) for name in _list(data, "data-collections")]
    return list(selected(pipeline.config, names)) if names else []


def _list(data: Mapping[str, Any], name: str) -> list[Any]:
    found = data.get(name) or []
    if not isinstance(found, list):
        raise ConfigurationError(f"{name} isn't a list.")
    return found
