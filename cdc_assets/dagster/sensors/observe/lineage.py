"""The sensor that tells an OpenLineage backend of copies and merges, where one is configured.

What it tells comes from the log, so it may be late, and a backend that is away holds nothing up:
the tick fails, and the next one tells it all. It tells first what it told of longest ago.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import dagster as dg
import psycopg

from cdc_assets.config.source import SourceConfig
from cdc_assets.dagster.names import of_source
from cdc_assets.dagster.sensors.pace import reachable, skipped
from cdc_assets.dagster.sensors.sessions import LOOK_SECONDS, keep_instance, session, status_of
from cdc_assets.errors import EnvironmentProblem, TableProblem, TablesFailed, first_line
from cdc_assets.messages.texts import counted
from cdc_assets.observe.openlineage.steps import remember_look, told
from cdc_assets.observe.openlineage.teller import Teller, client_of
from cdc_assets.readiness.foreign_errors import explained

if TYPE_CHECKING:
    from openlineage.client import OpenLineageClient

# A tick has a minute, and an event takes as long as the backend does.
_TICK_SECONDS = 30.0
_EVER = datetime.min.replace(tzinfo=UTC)

_clients: dict[str, OpenLineageClient] = {}


def lineage_sensor(config: SourceConfig) -> dg.SensorDefinition | None:
    """``openlineage_<source>``; None where no backend is configured."""
    asked = config.openlineage
    if asked is None:
        return None

    @dg.sensor(
        **of_source(config, "openlineage"),
        minimum_interval_seconds=round(asked.every.total_seconds()),
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Tells the OpenLineage backend of copies and merges.",
    )
    @skipped
    def tick(context: dg.SensorEvaluationContext) -> dg.SkipReason:
        keep_instance(context)
        ends, events, tables = time.monotonic() + _TICK_SECONDS, 0, 0
        problems = list[TableProblem]()
        with reachable(config), session(config, "openlineage sensor") as pipeline:
            found = status_of(pipeline, "openlineage", within_seconds=LOOK_SECONDS)
            before, now = told(pipeline.store), pipeline.store.server_now()
        client = _clients.get(config.dump()) or _clients.setdefault(
            config.dump(), client_of(config)
        )
        with session(config, "openlineage sensor") as pipeline:
            teller = Teller(pipeline, client, asked.namespace)
            known = [table for table in found.tables if table.state != "new"]
            known.sort(key=lambda table: before[table.name].at if table.name in before else _EVER)
            for table in known:
                if time.monotonic() > ends:
                    return dg.SkipReason(f"Told {counted(events, 'event')}; the rest comes next.")
                try:
                    sent = teller.tell(table, before.get(table.name), now)
                except (EnvironmentProblem, psycopg.Error):
                    raise
                except Exception as problem:  # noqa: BLE001 - one table's: the others are told
                    said = first_line(explained(problem, config))
                    problems.append(TableProblem(table.name, said))
                    continue
                events, tables = events + sent, tables + bool(sent)
            if not problems:
                remember_look(pipeline.store, now)
        if problems:
            raise TablesFailed(problems)
        return dg.SkipReason(f"Told {counted(events, 'event')} of {counted(tables, 'table')}.")

    return tick
