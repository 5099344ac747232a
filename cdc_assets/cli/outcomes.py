"""What commands did, as JSON: one object a table, or one for the source.

The forms are for scripts: keys are added, and none is renamed or taken away.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Self

import click

from cdc_assets.cli.terminal import CopyBar, show_drained
from cdc_assets.errors import TablesFailed

if TYPE_CHECKING:
    from cdc_assets.log.store import LogStore
    from cdc_assets.materializer.drain import Drained
    from cdc_assets.postgres.names import TableId
    from cdc_assets.snapshot.progress import CopyProgress

TABLE_FORM = (
    "a list with an object a table: table; copied, with chunks_done, chunks_total, rows, bytes and"
    " seconds; merged, with merges, changes, rows, applied_lsn, pending_entries and seconds; and"
    " problem. Each is null where there was none"
)


def echo(found: object) -> None:
    click.echo(json.dumps(found, indent=2))


class Outcomes:
    """Shows the progress of copies and merges, and at the end, if asked for, all as JSON.

    That is printed, too, if tables have failed: the error says the same to a person.
    """

    def __init__(self, tables: Sequence[TableId], *, as_json: bool, copies: bool = True) -> None:
        self._tables, self._as_json, self._copies = tables, as_json, copies
        self._copied: dict[TableId, CopyProgress] = {}
        self._merged: dict[TableId, Drained] = {}
        self._bar = CopyBar()

    def copied(self, progress: CopyProgress) -> None:
        self._copied[progress.table] = progress
        self._bar(progress)

    def merged(self, done: Drained) -> None:
        self._merged[done.table] = done
        show_drained(done)

    def __enter__(self) -> Self:
        if self._copies:
            self._bar.__enter__()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._copies:
            self._bar.__exit__()
        if self._as_json and (error is None or isinstance(error, TablesFailed)):
            problems = error.problems if isinstance(error, TablesFailed) else ()
            told = {problem.table: str(problem) for problem in problems}
            echo(
                [
                    {
                        "table": str(table),
                        "copied": _copied(self._copied.get(table)),
                        "merged": _merged(self._merged.get(table)),
                        "problem": told.get(table),
                    }
                    for table in self._tables
                ]
            )


def _copied(last: CopyProgress | None) -> dict[str, Any] | None:
    if last is None:
        return None
    return {
        "chunks_done": last.chunks_done,
        "chunks_total": last.chunks_total,
        "rows": last.rows,
        "bytes": last.bytes,
        "seconds": round(last.seconds, 3),
    }


def _merged(done: Drained | None) -> dict[str, Any] | None:
    if done is None:
        return None
    return {
        "merges": done.merges,
        "changes": done.changes,
        "rows": done.rows,
        "applied_lsn": str(done.cursor.applied_lsn),
        "pending_entries": done.pending_entries,
        "seconds": round(done.seconds, 3),
    }


def pauses(store: LogStore) -> dict[str, Any]:
    """The pauses of the source and of its tables, with their begin."""
    from cdc_assets.log.asked.wishes import paused, source_paused

    def told(since: datetime | None) -> str | None:
        return since.isoformat() if since is not None else None

    return {
        "source": store.source,
        "paused_since": told(source_paused(store)),
        "tables": {str(table): told(since) for table, since in sorted(paused(store).items())},
    }
