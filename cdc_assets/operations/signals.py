"""Signals: rows that ask for backfills and steer them, as with Debezium.

They are written into the coordination schema's table ``signals`` by anybody who has the right to,
or into a table of the source (``backfills.signals``), from which they are brought there. A signal's
outcome says what came of it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from cdc_assets.backfill.request import request
from cdc_assets.config.addresses import selected
from cdc_assets.errors import CdcError, ConfigurationError, first_line
from cdc_assets.log import backfills as record
from cdc_assets.messages.texts import named
from cdc_assets.operations.backfilling import BECOMES, Wish, wish
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.session.connect import LOCK_SECONDS, connect
from cdc_assets.readiness.asked.signals import Written, written

logger = logging.getLogger(__name__)

_KEPT_DAYS = 90


def bring_signals(pipeline: Pipeline) -> str | None:
    """Have the rows of the source's table among the signals; what keeps it from that, if anything.

    A row is brought once, by its ``id``: its signal is kept for as long as the row is there.
    """
    if pipeline.config.backfills.signals is None:
        return None
    try:
        with connect(
            pipeline.source_dsn, application_name="cdc_assets signals", lock_seconds=LOCK_SECONDS
        ) as source:
            there = written(source, pipeline.config)
    except (psycopg.Error, UnicodeDecodeError, CdcError) as problem:
        return f"Signals can't be read: {first_line(problem)}"
    store, ids = pipeline.store, [signal.id for signal in there]
    known = {
        row[0]
        for row in store.connection.execute(
            "select id from signals where source = %s and id = any(%s)", (store.source, ids)
        )
    }
    for signal in there:
        if signal.id not in known:
            _bring(pipeline, signal)
    if len(known) < len(there):
        _forget_old(pipeline, ids)
    return None


def _forget_old(pipeline: Pipeline, there: Sequence[str]) -> None:
    """Remove signals that were done long ago, but for those whose rows are still ``there``."""
    pipeline.store.connection.execute(
        "delete from signals where source = %s and done_at < now() - make_interval(days => %s)"
        " and not id = any(%s)",
        (pipeline.store.source, _KEPT_DAYS, list(there)),
    )


def _bring(pipeline: Pipeline, signal: Written) -> None:
    try:
        data = json.loads(signal.data or "{}")
    except (ValueError, RecursionError):
        data = signal.data  # it is refused as what it is
    store = pipeline.store
    insert = (
        "insert into signals (source, id, kind, data) values (%s, %s, %s, %s)"
        " on conflict do nothing"
    )
    about = (store.source, signal.id, signal.kind)
    try:
        store.connection.execute(insert, (*about, Jsonb(data)))
    # JSON knows characters that no text of Postgres has; and what is read may be too deep to write.
    except (psycopg.DataError, RecursionError):
        store.connection.execute(insert, (*about, Jsonb(None)))


def take_signals(pipeline: Pipeline) -> int:
    """Do what the new rows of ``signals`` ask for; how many there were."""
    store = pipeline.store
    rows = store.connection.execute(
        "select id, kind, data::text from signals where source = %s and done_at is null"
        " order by requested_at, id",
        (store.source,),
    ).fetchall()
    if rows and pipeline.config.backfills.signals is None:
        _forget_old(pipeline, [])
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
                    outcome = _do(pipeline, str(kind), str(data), f"signal {key}")
            except (CdcError, ValueError, psycopg.DataError, psycopg.ProgrammingError) as problem:
                outcome = f"refused: {first_line(problem)}"
            store.connection.execute(
                "update signals set outcome = %s where source = %s and id = %s",
                (outcome, store.source, key),
            )
        logger.info("signal %s (%s): %s", key, kind, outcome)
    return len(rows)


def _do(pipeline: Pipeline, kind: str, text: str, by: str) -> str:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):  # a number, or a depth, that Postgres takes
        data = None
    if not isinstance(data, Mapping):
        raise ConfigurationError("its data isn't a JSON object.")
    match kind:
        case "execute-snapshot":
            return _execute(pipeline, data, by)
        case "pause-snapshot":
            return _wished(pipeline, "pause", data)
        case "resume-snapshot":
            return _wished(pipeline, "resume", data)
        case "stop-snapshot":
            return _wished(pipeline, "stop", data)
        case "log":
            logger.warning("%s: %s", by, data.get("message", ""))
            return "logged"
    raise ConfigurationError(
        f"{named(kind)} is no kind of signal.",
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
    if not isinstance(replaces := data.get("replace", False), bool):
        raise ConfigurationError("replace is neither true nor false.")
    made = [
        request(pipeline, table, where.get(table), replaces=replaces, by=by) for table in tables
    ]
    return ", ".join(f"backfill {one.number} of {one.table}" for one in made)


def _wished(pipeline: Pipeline, what: Wish, data: Mapping[str, Any]) -> str:
    """``backfill``: its number; or those of ``data-collections``; or all that may."""
    if "backfill" in data:
        if not isinstance(number := data["backfill"], int) or not 0 < number < 2**63:
            raise ConfigurationError("backfill isn't the number of one.")
        return f"backfill {number} is {wish(pipeline, what, number).state}"
    tables = _tables(pipeline, data)
    done = [
        f"backfill {one.number} is {BECOMES[what]}"
        for one in record.backfills(pipeline.store)
        if (not tables or one.table in tables)
        and record.become(pipeline.store, one.number, BECOMES[what])
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
