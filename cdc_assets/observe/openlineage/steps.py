"""What happened to a table since a backend was told of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Self

from cdc_assets.log.states import TableState
from cdc_assets.log.store import LogStore
from cdc_assets.observe.status import TableStatus

# Keys in pipeline_meta, each followed by a table: what was told of it.
_TOLD = "openlineage.told:"
# And the one of when all tables were last looked at: a table that rests costs no statement.
_LOOKED = "openlineage.looked"
COPYING, COMPLETE = TableState.COPYING, (TableState.STREAMING, TableState.COPIED)
COPY, MERGE = "copy", "merge"


@dataclass(frozen=True, slots=True)
class Told:
    """A table as it was when it was last looked at; ``copied``: that its copy was complete."""

    epoch: int
    state: str
    copied: bool
    offset: int
    at: datetime

    @classmethod
    def parse(cls, text: str) -> Self:
        epoch, state, copied, offset, at = text.split()
        return cls(int(epoch), state, copied == "copied", int(offset), datetime.fromisoformat(at))

    def __str__(self) -> str:
        copied = "copied" if self.copied else "-"
        return f"{self.epoch} {self.state} {copied} {self.offset} {self.at.isoformat()}"


@dataclass(frozen=True, slots=True)
class Step:
    """One event: ``type`` is OpenLineage's; ``run`` names its run among those of its table.

    ``rows``: of a copy, or the changes of merges, that are complete.
    """

    work: str
    type: str
    run: str
    at: datetime
    rows: int | None = None
    reason: str | None = None


def steps(table: TableStatus, before: Told | None, now: datetime) -> Iterator[Step]:
    """What happened to a table since ``before``; None: nothing was told of it yet."""
    began = now if before is None else before.at
    same = before if before is not None and before.epoch == table.epoch else None
    if before is not None and same is None and before.state == COPYING:
        yield Step(COPY, "ABORT", f"{COPY} {before.epoch}", now)
    if same is None or not same.copied:
        yield from _copy(table, began, now, is_told=same is not None and same.state == COPYING)
        return
    first, last = same.offset, table.applied_offset
    if first < last:
        run = f"{MERGE} {table.epoch} {first}"
        yield Step(MERGE, "START", run, began)
        yield Step(MERGE, "COMPLETE", run, now, rows=last - first)  # each change has an offset
    if table.state == TableState.PARKED and same.state != TableState.PARKED:
        run = f"{MERGE} {table.epoch} {last} parked {now.isoformat()}"
        yield Step(MERGE, "START", run, began)
        yield Step(MERGE, "FAIL", run, now, reason=table.reason)


def _copy(table: TableStatus, began: datetime, now: datetime, *, is_told: bool) -> Iterator[Step]:
    """What happened to a copy; ``is_told``: that it is under way."""
    run = f"{COPY} {table.epoch}"
    if table.state == COPYING and not is_told:
        yield Step(COPY, "START", run, now)
    elif table.state in COMPLETE:
        if not is_told:
            yield Step(COPY, "START", run, began)
        yield Step(COPY, "COMPLETE", run, now, rows=table.rows_copied)
    elif table.state == TableState.PARKED and is_told:
        yield Step(COPY, "FAIL", run, now, reason=table.reason)


def told(store: LogStore) -> dict[str, Told]:
    """By table, what was told of it; what is known of tables that are gone is forgotten."""
    which = {"source": store.source, "prefix": f"{_TOLD}%", "first": len(_TOLD) + 1}
    store.connection.execute(
        "delete from pipeline_meta f where source = %(source)s and key like %(prefix)s"
        " and not exists (select from tables t where t.source = f.source"
        "  and t.table_name = substr(f.key, %(first)s))",
        which,
    )
    rows = store.connection.execute(
        "select substr(key, %(first)s), value from pipeline_meta"
        " where source = %(source)s and key like %(prefix)s",
        which,
    ).fetchall()
    found = {name: Told.parse(value) for name, value in rows}
    if (looked := store.meta(_LOOKED)) is not None:
        at = datetime.fromisoformat(looked)
        found = {name: replace(one, at=max(at, one.at)) for name, one in found.items()}
    return found


def remember_look(store: LogStore, at: datetime) -> None:
    """At all tables: what happened to them before ``at`` was told."""
    store.set_meta(_LOOKED, at.isoformat())


def remember(store: LogStore, table: str, told: Told) -> None:
    store.set_meta(f"{_TOLD}{table}", str(told))
