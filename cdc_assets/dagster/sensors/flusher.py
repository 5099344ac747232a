"""The sensor that keeps the flusher running and reports the staged log.

The tick starts the child and looks at it; it never flushes. A child that ended by itself is an
error of this sensor, with its last words: of the tick that notices it, and until it runs again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dagster as dg

from cdc_assets.config.addresses import embedded_postgres
from cdc_assets.config.source import SourceConfig
from cdc_assets.dagster.names import TableAssets, all_tables, of_source
from cdc_assets.dagster.resources.flusher import FlusherResource
from cdc_assets.dagster.sensors.pace import PACE_SECONDS, NotYet, patient, reachable
from cdc_assets.dagster.sensors.services import demo_is_made
from cdc_assets.dagster.sensors.sessions import ResourceSensor, session, status_of
from cdc_assets.errors import ReplicationProblem
from cdc_assets.log.asked.wishes import dropped_since
from cdc_assets.log.states import TableState
from cdc_assets.observe.status import SourceStatus
from cdc_assets.process.children import Status

# An event costs some 44 ms on SQLite and nobody reads more than one a minute.
REPORT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Reported:
    """The last event of a table's staged log: when, and where the log ended."""

    at: float
    end_offset: int


# By source and table; a new code server reports each log once more.
_reported: dict[tuple[str, str], Reported] = {}


def due(last: Reported | None, end_offset: int, now: float) -> bool:
    """Whether a table's log is reported: at first sight, then when it grew, once a minute."""
    if last is None:
        return True
    return end_offset > last.end_offset and now - last.at >= REPORT_SECONDS


def flusher_sensor(config: SourceConfig) -> dg.SensorDefinition:
    """``flusher_<source>``."""
    resource = f"flusher_{config.name}"
    tables = all_tables(config)

    @patient
    def tick(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        if config.postgres.embedded and embedded_postgres(config).dsn() is None:
            raise NotYet(f"Waiting for the embedded Postgres of {config.name} to start.")
        if config.postgres.demo and not demo_is_made(config):
            raise NotYet("Waiting for the demo's tables to be made.")
        flusher: FlusherResource = getattr(context.resources, resource)
        since = _dropped_since(config)
        if since is not None:
            flusher.stop()
            return dg.SkipReason(
                f"The source was dropped at {since}. The job resume_{config.name} takes it up"
                " again."
            )
        status = flusher.tick()
        if (end := status.end) is not None:
            raise ReplicationProblem(
                f"the flusher of {config.name} {end}: {status.last_words}",
                f"{status.again}; its log is {flusher.log_path}.",
            )
        with reachable(config), session(config, "flusher sensor") as pipeline:
            found = status_of(pipeline, "flusher")
            ends = pipeline.store.log_ends()
        return dg.SensorResult(
            skip_reason=sentence(status, found),
            asset_events=_events(config, tables, found, ends),
        )

    return ResourceSensor(
        **of_source(config, "flusher"),
        evaluation_fn=tick,
        minimum_interval_seconds=PACE_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        required_resource_keys={resource},
        description="Keeps the flusher running: slot → staged Parquet → log."
        if config.log is None
        else f"Keeps the flusher running: log of {config.log.of} → log.",
    )


def _dropped_since(config: SourceConfig) -> str | None:
    """When the source was given up, or None; an unreachable database is the flusher's matter."""
    try:
        with reachable(config), session(config, "flusher sensor") as pipeline:
            return dropped_since(pipeline.store)
    except NotYet:
        return None


def _events(
    config: SourceConfig,
    tables: Sequence[TableAssets],
    found: SourceStatus,
    ends: Mapping[str, int],
) -> list[dg.AssetMaterialization]:
    now, flushed = time.monotonic(), found.flusher.flushed_lsn
    if flushed is None:  # nothing is staged yet
        return []
    states = {table.name: table for table in found.tables}
    events = []
    for names in tables:
        name = str(names.table)
        state, end = states[name], ends.get(name, 0)
        last = _reported.get((config.name, name))
        if state.state in ("new", TableState.WAITING, TableState.PARKED) or not due(last, end, now):
            continue
        _reported[config.name, name] = Reported(now, end)
        shown: dict[str, Any] = {
            "rows staged": end - (last.end_offset if last is not None else 0),
            "rows staged in all": end,
            "rows waiting for the merge": state.pending_rows,
            "flushed LSN": str(flushed),
            "lag seconds": state.lag_seconds,
        }
        events.append(
            dg.AssetMaterialization(
                names.staged_log,
                metadata={key: value for key, value in shown.items() if value is not None},
            )
        )
    return events


def sentence(status: Status, found: SourceStatus) -> str:
    """What the flusher is doing, for the tick's line in the UI."""
    flusher, told = found.flusher, found.flusher.report
    if flusher.flushed_lsn is None:
        begun = "slot and publication" if found.slot_name else "its first poll"
        if found.log_of is not None:
            begun = "its log"
        parts = [f"The flusher (pid {status.pid}) is preparing {begun}"]
    else:
        said = flusher.sentence if flusher.state in ("streaming", "down") else str(flusher)
        parts = [
            f"The flusher (pid {status.pid}) is {said}",
            f"has staged everything below {flusher.flushed_lsn},"
            f" {flusher.flushed_seconds_ago:.0f} s ago"
            + (f", {told['lag_seconds']:.1f} s behind" if "lag_seconds" in told else ""),
        ]
    if told.get("changes"):
        changes = sum(sum(counts.values()) for counts in told["changes"].values())
        parts.append(f"{changes:,} changes of {len(told['changes'])} tables since its start")
    if found.slot is not None:
        kept = f"the slot keeps {found.retained_bytes / 1e6:,.1f} MB of WAL"
        parts.append(f"{kept} ({found.slot.wal_status})")
    if status.failures:
        parts.append(f"it was started again after ending {status.failures} times in a row")
    parked = [table.name for table in found.tables if table.state == TableState.PARKED]
    if parked:
        parts.append("parked: " + ", ".join(parked))
    return "; ".join(parts) + "."
