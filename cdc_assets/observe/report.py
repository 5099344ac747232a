"""The report of a source: one set of facts, as Markdown for the UI and as rows for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from cdc_assets.config.alerts import Severity
from cdc_assets.config.source import SourceConfig
from cdc_assets.log.states import TableState
from cdc_assets.messages.texts import bounded, command
from cdc_assets.messages.texts import markdown as markdown_text
from cdc_assets.observe.condition import Condition
from cdc_assets.observe.conditions import conditions
from cdc_assets.observe.facts import Facts, facts
from cdc_assets.observe.message import lasted
from cdc_assets.observe.plot import line_chart, picture
from cdc_assets.observe.samples import Sample, applied_per_second, history, take
from cdc_assets.observe.status import SourceStatus, TableStatus
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId

# The length that a person reads of one matter; the alerts and `status` have more.
_CELL = 1_000
_NAMED = 20  # tables by their names in the lake
FLUSHER = "flusher"  # the name of its part
TABLE_HEADINGS = ("table", "state", "chunks", "applied", "lag", "pending", "reason")


@dataclass(frozen=True, slots=True)
class Problem:
    """A condition that is worth a line; ``severity`` is None while it is young."""

    condition: Condition
    severity: Severity | None


@dataclass(frozen=True, slots=True)
class Health:
    """Everything that is reported of a source at one moment."""

    status: SourceStatus
    problems: tuple[Problem, ...]
    samples: tuple[Sample, ...]

    @property
    def grade(self) -> str:
        grades = {problem.severity for problem in self.problems}
        return "fail" if "fail" in grades else "warn" if "warn" in grades else "ok"

    @property
    def rows_per_second(self) -> float | None:
        """Changes applied, over the last minutes."""
        last = applied_per_second(self.samples[-6:])
        return sum(rate for _, rate in last) / len(last) if last else None


def look(pipeline: Pipeline, *, sample: bool = True) -> Health:
    """Collect a source's health; take a sample if one is due. Raises psycopg.OperationalError."""
    found = facts(pipeline)
    assert found.status is not None  # `facts` raises where it can't be had
    if sample:
        take(pipeline.store, found.status)
    samples = tuple(history(pipeline.store))
    return Health(found.status, problems(found, pipeline.config), samples)


def problems(found: Facts, config: SourceConfig) -> tuple[Problem, ...]:
    """The conditions, the worst first; those not bad enough yet to be reported are left out."""
    graded = []
    for condition in conditions(found, config):
        # A condition without a known begin is shown as young until the alerts grade it.
        age = (found.now - condition.since).total_seconds() if condition.since else 0.0
        severity = condition.limits.grade(age)
        if severity is not None or condition.since is None:
            graded.append(Problem(condition, severity))
    return tuple(sorted(graded, key=lambda p: ("fail", "warn", None).index(p.severity)))


def copied(row: TableStatus) -> str:
    """How far the table's copy is."""
    text = f"{row.chunks_done}/{row.chunks_total}"
    if row.state != TableState.COPYING:
        return text
    text += f" ({100 * row.chunks_done // max(1, row.chunks_total)} %)"
    if row.copy_rows_per_second is not None and row.copy_seconds_left is not None:
        text += f", {row.copy_rows_per_second:,.0f} rows/s, {row.copy_seconds_left:,.0f} s left"
    return text


def table_rows(status: SourceStatus) -> list[tuple[str, ...]]:
    """A row a table, under :data:`TABLE_HEADINGS`."""
    return [
        (
            row.name,
            f"{row.state}, paused" if row.paused_since else row.state,
            copied(row),
            row.applied_lsn or "",
            "" if row.lag_seconds is None else f"{row.lag_seconds:.1f} s, {row.lag_bytes:,} B",
            f"{row.pending_rows:,}",
            row.reason
            or row.problem
            or (f"paused since {row.paused_since}" if row.paused_since else "; ".join(row.info)),
        )
        for row in status.tables
    ]


def part_rows(health: Health) -> list[tuple[str, str]]:
    """Name and value of what isn't a table's: slot, flusher, waits, pins, throughput."""
    status, slot = health.status, "doesn't exist yet"
    if status.slot is not None:
        slot = f"{status.slot.wal_status}, keeps {status.retained_bytes / 1e6:,.1f} MB of WAL"
    parts = [(FLUSHER, str(status.flusher))]
    if status.log_of is not None:
        parts.insert(0, ("log", f"that of source {status.log_of}, which is passed on"))
    elif status.slot_name:  # there is none in query mode
        parts.insert(0, (f"slot {status.slot_name}", slot))
    if status.standby is not None:
        parts.insert(0, ("standby", str(status.standby)))
    if status.tables:
        parts.insert(0, ("lake", _lake_names(status.tables)))
    if status.flusher.state == "dropped":
        anew = f"dropped; to take it up again: {command('resume')}"
        parts.insert(0, (f"source {status.source}", anew))
    parts += [(f"waits: {wait.session}", wait.sentence) for wait in status.waits]
    parts += [(f"waits: {wait.session}", wait.sentence) for wait in status.lock_waits]
    for pin in status.pins:
        tables = f"of {', '.join(pin.tables) or 'no table any more'}"
        keeps = f"vacuum keeps what was deleted in the last {pin.xmin_age:,} transactions"
        parts.append(("pinned snapshot", f"{tables}, held for {pin.seconds:,.0f} s: {keeps}"))
    for table in status.left:
        out = f"it is out of the configuration; to end that: {command('drop-table', table)}"
        parts.append((f"still staged: {table}", out))
    for table in status.dropped:
        out = f"it is out of the configuration, so give it up: {command('drop-table', table)}"
        parts.append((f"dropped in the source: {table}", out))
    for one in status.backfills:
        name, _, said = one.sentence.partition(": ")
        parts.append((name, f"{said}; {one.reason}" if one.reason else said))
    parts += [(f"group {group.name}", group.sentence) for group in status.groups]
    if health.rows_per_second is not None:
        parts.append(("applied", f"{health.rows_per_second:,.0f} changes/s"))
    return parts


def _plain_name(table: str) -> str:
    with suppress(ValueError):
        return TableId.parse(table).name
    return table


def _lake_names(tables: Sequence[TableStatus]) -> str:
    """Where the tables are in the lake; by name those that have another one there."""
    spaces = sorted({table.lake_table.partition(".")[0] for table in tables})
    others = [
        f"{table.name} is {table.lake_table}"
        for table in tables
        if table.lake_table.partition(".")[2] != _plain_name(table.name)
    ]
    more = [f"and {len(others) - _NAMED:,} more have other names"] if len(others) > _NAMED else []
    return "; ".join([f"the tables of {', '.join(spaces)}", *others[:_NAMED], *more])


def markdown(health: Health) -> str:
    """The report for the UI: problems with their remedies, parts, tables, plots."""
    parts = [f"## {health.status.source}: {health.grade.upper()}", _problems(health.problems)]
    parts.append(_table(("part", "is"), part_rows(health)))
    parts.append(_table(TABLE_HEADINGS, table_rows(health.status)))
    parts += [picture(alt, svg) for alt, svg in charts(health.samples)]
    return "\n\n".join(part for part in parts if part)


def charts(samples: Sequence[Sample]) -> list[tuple[str, str]]:
    """Lag, throughput and retained WAL over the last day: name and SVG."""
    lags = [(sample.at, sample.lag_seconds) for sample in samples]
    return [
        (
            "lag",
            line_chart("lag of the slowest table", lags, lasted),
        ),
        (
            "throughput",
            line_chart(
                "changes applied a second",
                list(applied_per_second(samples)),
                lambda v: f"{v:,.0f}/s" if v >= 10 or not v else f"{v:.1f}/s",
            ),
        ),
        (
            "retained WAL",
            line_chart(
                "WAL that the slot keeps",
                [(s.at, float(s.retained_bytes)) for s in samples],
                lambda v: f"{v / 1e6:,.0f} MB" if v >= 1e7 else f"{v / 1e6:,.1f} MB",
            ),
        ),
    ]


def _problems(found: Sequence[Problem]) -> str:
    return "\n".join(
        f"- **{(problem.severity or 'new').upper()}** {_cell(problem.condition.what)}:"
        f" {_cell(problem.condition.detail)}. {_cell(problem.condition.remedy)}"
        for problem in found
    )


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *[[_cell(cell) for cell in row] for row in rows]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(said: str) -> str:
    return markdown_text(bounded(said, _CELL))
