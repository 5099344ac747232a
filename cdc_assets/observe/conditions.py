"""From facts to conditions: everything that is wrong at one moment. Pure functions.

A condition lasts: its key stays the same meanwhile, and its limits are the times after which it is
a warning and a failure. ``notices`` knows whether it was reported already.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from dataclasses import replace

from cdc_assets.config.source import SourceConfig
from cdc_assets.log.states import TableState
from cdc_assets.observe.condition import COMMAND, FAIL, WARN, Condition, Limits, ago, at_once
from cdc_assets.observe.facts import Facts
from cdc_assets.observe.readers.groups import groups
from cdc_assets.observe.slot_conditions import pins, slot, standby
from cdc_assets.observe.status import SourceStatus, TableStatus

# Sensors retry a failed run; after so many failures in a row it needs a person.
_RUNS_FAIL = 3

# One that ends again and again is starting at some looks: the condition lasts meanwhile.
_NOT_STREAMING = {
    "down": "no flusher is active",
    "stopped": "no flusher is active",
    "starting": "the flusher doesn't stream yet",
    "silent": "the flusher hangs",
}

# A chunk takes seconds, a worker's start half a minute.
_COPY_IDLE = Limits(600.0, 3600.0)


def conditions(facts: Facts, config: SourceConfig) -> list[Condition]:
    """Everything that is wrong; several conditions may share a key, then the worst counts."""
    return [
        *_reachable(facts, config),
        *_flusher(facts, config),
        *(slot(facts, config.alerts.slot, config.slot) if config.decodes else ()),
        *standby(facts, config.alerts.health),
        *_materializer(facts, config),
        *_spark(facts, config),
        *_tables(facts, config),
        *_left(facts.status, config),
        *_waits(facts.status, config),
        *groups(facts.status, config),
        *pins(facts, config.alerts.slot),
        *_dagster(facts, config),
    ]


# The keys of conditions that are known without asking the databases.
_ASKED_ELSEWHERE = ("source", "coordination", "facts", "spark", "run:", "check:", "sink:")


def unknown(key: str, facts: Facts) -> bool:
    """Whether the facts can't show if that is still wrong; such a condition stays."""
    return facts.status is None and not key.startswith(_ASKED_ELSEWHERE)


def _reachable(facts: Facts, config: SourceConfig) -> Iterator[Condition]:
    limits = Limits.of(config.alerts.health)
    for key, problem, what in (
        ("source", facts.source_problem, "the source database can't be reached"),
        ("coordination", facts.log_problem, "the coordination database can't be reached"),
    ):
        if problem is not None:
            yield Condition(
                key,
                what,
                problem,
                f"Start it or mend the network; `{COMMAND} check` says what else is missing.",
                limits,
            )
    if facts.problem is not None:
        yield Condition(
            "facts",
            "how the source is can't be asked",
            facts.problem,
            f"`{COMMAND} check` says what is missing. Until then nothing else of it is told.",
            limits,
        )


def _flusher(facts: Facts, config: SourceConfig) -> Iterator[Condition]:
    if facts.status is None or not config.streams:
        return
    flusher, limits = facts.status.flusher, Limits.of(config.alerts.health)
    state, detail = flusher.state, str(flusher)
    if state == "retrying staging":
        yield Condition(
            "staging",
            f"the staging store can't be written ({config.staging_uri})",
            detail,
            "Make space or grant the rights; the flusher goes on by itself, and the slot keeps the"
            " WAL meanwhile. See 'Faults the flusher lives through' in docs/faults/flusher.md.",
            limits,
        )
    elif state in _NOT_STREAMING:
        yield Condition(
            "flusher",
            _NOT_STREAMING[state],
            detail,
            f"Look at the sensor flusher_{config.name} and the flusher's log; `{COMMAND} flush`"
            " streams by hand.",
            limits,
        )
    elif state == "stuck":
        yield Condition(
            "stream",
            "the source can't send its changes",
            detail,
            "See 'A stream that ends at the same place' in docs/faults/flusher.md.",
            limits,
        )
    elif state == "reconnecting":
        yield Condition(
            "flusher",
            "the flusher can't get its stream back",
            detail,
            f"Its log says why; `{COMMAND} check` names what the source lacks.",
            limits,
        )


def _materializer(facts: Facts, config: SourceConfig) -> Iterator[Condition]:
    waiting = [
        t for t in _tables_of(facts.status) if t.pending_rows and t.state == TableState.STREAMING
    ]
    waiting = [table for table in waiting if table.paused_since is None]
    if not waiting:
        return
    waited = max(
        config.table(table.name).freshness.overdue_seconds(table.lag_seconds or 0.0, facts.now)
        for table in waiting
    )
    stuck = waited if facts.merged_seconds is None else min(waited, facts.merged_seconds)
    yield Condition(
        "materializer",
        "the log isn't applied to the lake",
        f"{sum(t.pending_rows for t in waiting):,} changes of {len(waiting)} tables wait",
        f"Look at the sensor materializer_{config.name} and"
        f" {'its last run' if config.materializer == 'run' else 'the log of the follower'};"
        f" `{COMMAND} materialize` does it by hand.",
        Limits.of(config.alerts.health),
        ago(facts, stuck),
    )


def _spark(facts: Facts, config: SourceConfig) -> Iterator[Condition]:
    if facts.spark_problem is not None:
        help_ = "Start it, or correct spark.remote."
        if config.spark.remote is None:
            help_ = f"Look at the sensor services_{config.name}: it starts the local server."
        yield Condition(
            "spark",
            "Spark can't be reached",
            facts.spark_problem,
            help_,
            Limits.of(config.alerts.health),
        )


def _tables_of(status: SourceStatus | None) -> tuple[TableStatus, ...]:
    return status.tables if status is not None else ()


def _of(command: str, table: TableStatus) -> str:
    return f"{COMMAND} {command} {shlex.quote(table.name)}"


def _tables(facts: Facts, config: SourceConfig) -> Iterator[Condition]:
    dropped = facts.status is not None and facts.status.flusher.state == "dropped"
    for table in _tables_of(facts.status):
        if table.state == TableState.PARKED:
            yield Condition(
                f"parked:{table.name}",
                f"{table.name} is parked: nothing of it is applied",
                table.reason or "no reason was noted",
                "It is copied anew then."
                if _of("resync", table) in (table.reason or "")
                else f"Mend the cause, then `{_of('resync', table)}`.",
            )
        elif table.state == "new" and not dropped:
            yield Condition(
                f"new:{table.name}",
                f"{table.name} isn't followed yet",
                "it is in the configuration, and nobody has taken it up",
                "Start the flusher anew, so that it reads the configuration;"
                f" `{COMMAND} check` says what else is missing.",
                Limits.of(config.alerts.health),
            )
        elif table.state == TableState.WAITING:
            yield Condition(
                f"waiting:{table.name}",
                f"{table.name} waits for its pin",
                table.reason or "its copy can't begin before",
                f"`{COMMAND} status` says who holds it up: a long transaction at the source, or the"
                " flusher.",
                Limits.of(config.alerts.health),
            )
        elif table.state == TableState.COPYING and table.copy_idle_seconds is not None:
            yield Condition(
                f"copy:{table.name}",
                f"the copy of {table.name} doesn't get on",
                f"{table.chunks_done} of {table.chunks_total} chunks are there, and none was"
                f" written for {table.copy_idle_seconds:.0f} s",
                "Look at the runs of the snapshot asset;"
                f" `{_of('snapshot --table', table)}` copies by hand.",
                _COPY_IDLE,
                ago(facts, table.copy_idle_seconds),
            )
        elif table.paused_since is None and table.lag_seconds is not None:
            if table.problem is not None:
                yield Condition(
                    f"merge:{table.name}",
                    f"the changes of {table.name} can't be applied",
                    table.problem,
                    "It is tried again by itself, at ever longer intervals."
                    f" `{_of('materialize --table', table)}` tries at once.",
                    Limits.of(config.alerts.health),
                    ago(facts, table.problem_seconds or 0.0),
                )
            window = config.table(table.name).freshness
            limits = Limits(window.warn.total_seconds(), window.fail.total_seconds())
            yield Condition(
                f"freshness:{table.lake_table}",
                f"{table.lake_table} is behind {table.name}",
                f"{table.lag_seconds:.0f} s, {table.pending_rows:,} changes wait (warning above"
                f" {limits.warn:.0f} s, failure above {limits.fail:.0f} s)",
                f"`{COMMAND} status` says where it waits.",
                limits,
                ago(facts, table.lag_seconds),
            )


def _left(status: SourceStatus | None, config: SourceConfig) -> Iterator[Condition]:
    """Of each table by itself, and never a failure: it may be on purpose, for another process."""
    for name in status.left if status is not None else ():
        drop = f"{COMMAND} drop-table {shlex.quote(name)}"
        yield Condition(
            f"left:{name}",
            f"{name} is out of the configuration, and still staged",
            "nothing of it is merged, and nothing removes what is staged",
            f"`{drop}` ends that; or put it back.",
            replace(Limits.of(config.alerts.health), fail=math.inf),
        )


def _waits(status: SourceStatus | None, config: SourceConfig) -> Iterator[Condition]:
    for wait in status.waits if status is not None else ():
        yield Condition(
            f"wait:{wait.session}:{wait.waits_for}",
            f"{wait.session} waits at the source for {wait.waits_for}",
            f"since {wait.seconds:.0f} s, held by {'; '.join(wait.holders) or 'nobody any more'}",
            "Let it end, or end it: select pg_terminate_backend(pid); rollback prepared '…'."
            " The other tables go on.",
            Limits.of(config.alerts.health),
        )


def _dagster(facts: Facts, config: SourceConfig) -> Iterator[Condition]:
    paused = {t.lake_table for t in _tables_of(facts.status) if t.paused_since is not None}
    for stale in facts.stale:
        if stale.lake_table not in paused:
            yield Condition(
                f"freshness:{stale.lake_table}",
                f"{stale.lake_table} isn't fresh",
                f"Dagster's freshness policy: {stale.severity.upper()}",
                f"Look at the sensors' last ticks; `{COMMAND} status` says where it waits.",
                at_once(stale.severity),
                stale.since,
            )
    for run in facts.failed_runs:
        often = f", {run.in_a_row} times in a row" if run.in_a_row > 1 else ""
        yield Condition(
            f"run:{run.name}",
            f"the run of {run.name} failed",
            f"run {run.run_id}{often}",
            "Open it in the UI: the error is its last event. The sensors try again by themselves.",
            FAIL if run.in_a_row >= _RUNS_FAIL else WARN,
            run.since,
        )
    yield from _unchecked(facts, config)
    for check in facts.failed_checks:
        yield Condition(
            f"check:{check.asset}:{check.name}",
            f"the check {check.name} of {check.asset} failed",
            check.said,
            check.remedy or f"`{COMMAND} verify` compares every row; `{COMMAND} resync` copies it.",
            at_once(check.severity),
        )


def _unchecked(facts: Facts, config: SourceConfig) -> Iterator[Condition]:
    longest = config.verify.fail_after.total_seconds()
    for check in facts.unchecked:
        last = f"{check.since:%Y-%m-%d %H:%M:%S %Z}" if check.since is not None else "never"
        yield Condition(
            f"unchecked:{check.name}" + ("" if check.since is not None else ":never"),
            f"the check {check.name} isn't run",
            f"{check.tables} tables; the last time: {last}",
            f"Look at the runs and the ticks of checks_{config.name} and sample_{config.name}: one"
            " that hangs or waits in the queue keeps the next from starting.",
            Limits(longest, 2 * longest),
            check.since,
        )
