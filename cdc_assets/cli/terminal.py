"""Output of the commands: results on stdout, messages and progress on stderr."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import click
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from cdc_assets.cli import columns
from cdc_assets.cli.pasted import told
from cdc_assets.messages.texts import command, counted, plain

if TYPE_CHECKING:
    from cdc_assets.log.sessions.flusher_status import FlusherStatus
    from cdc_assets.log.store import LogStore
    from cdc_assets.maintenance.run import Maintained
    from cdc_assets.materializer.drain import Drained
    from cdc_assets.messages.findings import Finding
    from cdc_assets.observe.condition import Condition
    from cdc_assets.observe.report import Health, Problem
    from cdc_assets.setup.inventory import Listed
    from cdc_assets.snapshot.progress import CopyProgress
    from cdc_assets.verify.difference import Comparison

# The severities in the order in which they are shown.
_FINDINGS: Mapping[str, dict[str, Any]] = {
    "info": {"fg": "green"},
    "warning": {"fg": "yellow"},
    "error": {"fg": "red", "bold": True},
}
_COLOURS = {"fail": "bold red", "warn": "yellow"}
# Conditions by which tables are behind; nobody knows for how long they last when status asks.
_CAUSES = ("flusher", "stream", "staging", "spark", "materializer")
_CLAIMS = 20  # tables of a worker that are named
_NOWHERE = "0/0"  # an LSN before the first one
stderr = Console(stderr=True, highlight=False, soft_wrap=True)


def shown(text: str) -> Text:
    """``text`` shown literally: no markup of rich and no control character takes effect."""
    return Text(told(text))


def note(text: str) -> None:
    """A message, on stderr."""
    stderr.print(shown(text))


def labelled(label: str, style: str, text: str) -> None:
    """A message that begins with a coloured word."""
    stderr.print(Text.assemble((label, style), " ", told(text)))


def say(text: str) -> None:
    """A line of the result, on stdout."""
    click.echo(told(text))


class CopyBar:
    """A progress bar for every table that is being copied."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rows]:,} rows {task.fields[rate]:,.0f}/s"),
            TimeRemainingColumn(),
            console=stderr,
            disable=not stderr.is_terminal,  # it gets sentences
        )
        self._tasks: dict[str, Any] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, progress: CopyProgress) -> None:
        with self._lock:
            name = plain(str(progress.table))
            if name not in self._tasks:
                self._tasks[name] = self._progress.add_task(name, rows=0, rate=0)
            self._progress.update(
                self._tasks[name],
                total=progress.chunks_total,
                completed=progress.chunks_done,
                rows=progress.rows,
                rate=progress.rows / max(progress.seconds, 0.001),
            )
        if not stderr.is_terminal:
            note(progress.sentence)


def show_findings(findings: Sequence[Finding], tables: int) -> None:
    """Findings of ``check`` with their remedies, errors last; and whether all is ready."""
    for severity, colour in _FINDINGS.items():
        for finding in findings:
            if finding.severity == severity:
                said = told(f"{finding.code}: {finding.message}")
                click.echo(f"{click.style(severity, **colour)} {said}")
                if finding.remedy:
                    say(f"    {finding.remedy}")
    many = Counter(finding.severity for finding in findings)
    wrong = [counted(many[s], s) for s in ("error", "warning") if many[s]]
    if many["error"]:
        say(f"not ready: {', '.join(wrong)}")
    else:
        say(f"ready: {', '.join([counted(tables, 'table'), *wrong])}")


def show_tables(found: Sequence[Listed], *, stderr: bool = False, wide: bool = False) -> None:
    """The tables of a database, with what is in the way of each."""
    rows = [
        (
            str(listed.id) + (f" ({listed.partitions:,} partitions)" if listed.partitions else ""),
            "?" if listed.rows is None else f"{listed.rows:,}",
            decimal(listed.bytes),
            ", ".join(listed.key),
            listed.replica_identity,
            ", ".join(f.code for f in listed.obstacles) or listed.state,
        )
        for listed in found
    ]
    headings = ("table", "rows", "size", "key", "identity", "in the way")
    columns.show(headings, rows, stderr=stderr, wide=wide)
    for finding in (f for listed in found for f in listed.obstacles):
        note(f"{finding.code}: {finding.message}\n    {finding.remedy}".rstrip())


def show_paused(store: LogStore) -> None:
    """The pauses of the source and of its tables, with their begin."""
    from cdc_assets.log.asked.wishes import paused, source_paused

    since = source_paused(store)
    if since is not None:
        say(f"source {store.source}: paused since {since}")
    for table, at in sorted(paused(store).items()):
        if since is None or at < since:
            say(f"{table}: paused since {at}")


def show_drained(done: Drained) -> None:
    """What was merged into a table."""
    note(
        f"{done.table}: {counted(done.changes, 'change')} in {counted(done.merges, 'merge')},"
        f" {counted(done.rows, 'row')}, applied to {done.cursor.applied_lsn} ({done.seconds:.1f} s)"
    )


def show_compared(found: Sequence[Comparison]) -> None:
    """What ``verify`` found of each table."""
    for c in found:
        if c.equal:
            say(f"{c.table}: equal, {counted(c.source_rows, 'row')} at {c.lsn}")
        elif c.problem:
            since = f" since {c.since:%Y-%m-%d %H:%M:%S %Z}" if c.since is not None else ""
            say(f"{c.table}: not compared{since}: {c.problem}")
        else:
            say(
                f"{c.table}: {counted(c.differing, 'key', 'differ')} (source"
                f" {counted(c.source_rows, 'row')}, lake {counted(c.lake_rows, 'row')})"
            )
            for key in c.keys:
                say(f"    {key}")
        for said in c.remarks:
            say(f"    {said}")
        if c.outcome == "different" and c.unrepaired is None:
            them = "it" if c.differing == 1 else "them"
            say(f"    To correct {them}: {command('verify', '--table', c.table, '--repair')}")


def show_maintained(done: list[Maintained], *, wide: bool = False) -> None:
    """What ``maintain`` did, as a table."""
    rows = []
    for found in done:
        compacted, removed = found.compacted, "{0.files:,} files, {1:,.1f} MB"
        orphans = replace(
            found.orphans,
            files=found.orphans.files + found.dead_copies.files + found.staged_orphans.files,
            bytes=found.orphans.bytes + found.dead_copies.bytes + found.staged_orphans.bytes,
        )
        looked_at = found.data_files or found.snapshots or not found.left_alone
        rows.append(
            (
                str(found.table),
                f"{compacted.rewritten_files:,} files into {compacted.added_files:,}",
                f"{found.expired.snapshots:,} expired, "
                + removed.format(found.expired, found.expired.bytes / 1e6),
                removed.format(orphans, orphans.bytes / 1e6),
                removed.format(found.staged, found.staged.bytes / 1e6),
                f"{found.data_files:,} files, {found.snapshots:,} snapshots" if looked_at else "",
                found.left_alone or "",
            )
        )
    headings = ("table", "compacted", "snapshots", "orphans", "staged", "now", "left alone")
    for remark in columns.show(headings, rows, remarks=True, wide=wide):
        say(remark)


def _is_lag(problem: Problem) -> bool:
    return problem.condition.key.startswith("freshness:")


def _is_parked(problem: Problem) -> bool:
    return problem.condition.key.startswith("parked:")


def _show_problem(severity: str, condition: Condition) -> None:
    labelled(severity, _COLOURS[severity], f"{condition.what}: {condition.detail}")
    note(f"    {condition.remedy}")


def show_health(health: Health, *, wide: bool = False) -> None:
    """``status`` for a person: problems, tables, workers, parts."""
    from cdc_assets.observe import report

    found = health.status
    lagging = [p for p in health.problems if _is_lag(p) and p.severity is not None]
    for problem in health.problems:
        if lagging and problem.severity is None and problem.condition.key in _CAUSES:
            _show_problem("warn", problem.condition)
        elif problem.severity is not None and (len(lagging) < 2 or not _is_lag(problem)):
            _show_problem(problem.severity, problem.condition)
    if len(lagging) > 1:  # each has the same to say
        named = ", ".join(sorted(p.condition.key.partition(":")[2] for p in lagging))
        worst = "fail" if any(p.severity == "fail" for p in lagging) else "warn"
        labelled(worst, _COLOURS[worst], f"{len(lagging)} lake tables are behind: {named}")
    rows, title = report.table_rows(found), f"source {found.source}"
    told = tuple(p.condition.detail for p in health.problems if _is_parked(p))
    for remark in columns.show(report.TABLE_HEADINGS, rows, remarks=True, title=title, wide=wide):
        if not remark.endswith(told):
            say(remark)
    for worker in found.workers:
        heard = "" if worker.alive else f"; not heard of for {worker.heard_seconds_ago or 0:.0f} s"
        names = [*map(str, sorted(worker.claims))]
        more = f" and {len(names) - _CLAIMS:,} more" if len(names) > _CLAIMS else ""
        say(
            f"worker {worker.process}, since {worker.started_at:%Y-%m-%d %H:%M:%S}: "
            + (", ".join(names[:_CLAIMS]) or "no table")
            + more
            + heard
        )
    for name, value in report.part_rows(health):
        say(f"{name}: {value}")
        if name == report.FLUSHER:
            _show_flusher(found.flusher)


def _show_flusher(flusher: FlusherStatus) -> None:
    """What it told last, below its line; how far behind it is, as of now."""
    said = flusher.report
    if "changes" not in said:
        return
    positions = [
        f"{does} {said[f'{does}_lsn']}"
        for does in ("received", "staged", "acknowledged")
        if said[f"{does}_lsn"] != _NOWHERE
    ]
    parts = [", ".join(positions) or "received nothing yet"]
    if flusher.lag_bytes is not None and flusher.behind_seconds is not None:
        seconds = flusher.behind_seconds if flusher.lag_bytes else 0.0
        parts.append(f"{flusher.lag_bytes:,} B and {seconds:.1f} s behind")
    if said["staging_retries"]:
        parts.append(f"staging was retried {counted(said['staging_retries'], 'time')}")
    say(f"  {'; '.join(parts)} (told {flusher.told_seconds_ago:.0f} s ago)")
    for name, counts in said["changes"].items():
        listed = ", ".join(counted(count, operation) for operation, count in counts.items())
        say(f"  {name}: {listed}; {said['bytes'].get(name, 0) / 1e6:,.1f} MB staged")
    for thread, trouble in said.get("troubles", {}).items():
        say(f"  {thread}: {trouble}")
