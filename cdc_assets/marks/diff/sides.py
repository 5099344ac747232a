"""The two sides of a diff: a lake, what its log says of the mark, and its tables at that tag.

No lake is written to, and no log brought up to date: the other side may be of another version of
this package, whose own processes are at work. Its lake tables say themselves what their columns
are (``lake.columns``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import psycopg
from pyspark.sql import SparkSession

from cdc_assets.config.addresses import coordination_dsn
from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import ConfigurationError, EnvironmentProblem, TableProblem
from cdc_assets.lake.columns import PROPERTY, TableColumns
from cdc_assets.lake.tables import LakeTable
from cdc_assets.log.asked.marks import Mark, MarkedTable, MarkState, marks
from cdc_assets.log.schema.ownership import refuse_foreign
from cdc_assets.log.states import TableState
from cdc_assets.log.store import LogStore
from cdc_assets.log.table_row import TableRow
from cdc_assets.masks import rules_of
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.session.connect import Connection, connect
from cdc_assets.readiness.foreign_errors import explained
from cdc_assets.verify.rows import Beside, as_of

_SAME = (
    "Make one that both have: cdc-assets mark NAME --publish, with markers.table set in both"
    " configurations, or, where one is the second lake of the other, in the other."
)


class NoMark(TableProblem):
    """A table hasn't the mark's tag on one side."""


@dataclass(frozen=True, slots=True)
class Side:
    """One of the lakes; ``name``: how messages call it."""

    name: str
    config: SourceConfig
    store: LogStore
    mark: Mark

    @property
    def tables(self) -> Mapping[TableId, MarkedTable]:
        return {marked.table: marked for marked in self.mark.tables}

    def at_mark(self, session: SparkSession, table: TableId) -> tuple[Beside, int]:
        """The table's rows at the mark, and how many its snapshot has.

        Raises NoMark, or TableProblem where the lake table can't be read.
        """
        marked = self.tables.get(table)
        if marked is None:
            raise NoMark(table, f"{self.name}: it wasn't in the configuration at the mark")
        if marked.state != MarkState.TAGGED:
            raise NoMark(table, f"{self.name}: {marked.state}: {marked.lacking}")
        lake = self._lake(table)
        snapshot = lake.loaded().snapshot_by_name(self.mark.tag)
        if snapshot is None:
            raise NoMark(table, f"{self.name}: its lake table has no tag {self.mark.tag} any more")
        total = snapshot.summary["total-records"] if snapshot.summary is not None else None
        return as_of(session, lake, snapshot.snapshot_id), int(total or 0)

    def _lake(self, table: TableId) -> LakeTable:
        config, wanted = self.config, self.config.table(table)
        rules, mode = rules_of(config.masks(table) or {}), wanted.mode or "mirror"
        row = _row(table, TableColumns((), ()), mode, rules)
        said = LakeTable(config, wanted, row).loaded().properties.get(PROPERTY)
        if said is not None:
            return LakeTable(config, wanted, _row(table, TableColumns.parse(said), mode, rules))
        known = self.store.table(table)  # a table of an early version doesn't say it
        if known is None:
            raise TableProblem(table, f"{self.name}: nothing says which columns it has")
        return LakeTable(config, wanted, known)


def _row(table: TableId, columns: TableColumns, mode: str, rules: Mapping[str, str]) -> TableRow:
    """What a comparison has to know of a table: nothing of its copy or its log."""
    return TableRow(
        table=table,
        oid=0,
        epoch=0,
        state=TableState.STREAMING,
        key_columns=columns.key,
        columns=columns.columns,
        snapshot_lsn=None,
        complete_lsn=None,
        pin=None,
        reason=None,
        mode=mode,
        masks=rules,
    )


@contextmanager
def opened(name: str, config: SourceConfig, mark: str) -> Iterator[Side]:
    """A side with its mark.

    Raises ConfigurationError if it has no such mark, and EnvironmentProblem if it can't be reached.
    """
    schema = config.state.schema_
    with _connected(name, config) as connection:
        refuse_foreign(connection, schema)
        store = LogStore(connection, config.name, schema)
        try:
            found = marks(store, mark)
        except psycopg.errors.UndefinedTable:  # never begun, or by a version without marks
            found = []
        if not found:
            raise ConfigurationError(
                f"{name} ({config.name}) has no mark {mark}.",
                _SAME,
            )
        yield Side(name, config, store, found[0])


def _connected(name: str, config: SourceConfig) -> Connection:
    try:
        return connect(coordination_dsn(config), application_name="cdc_assets diff")
    except psycopg.OperationalError as error:
        told = explained(error, config)  # its settings, which are in a file of its own
        raise EnvironmentProblem(f"{name}: {told.what}", told.remedy) from error


def same_point(blue: Side, green: Side) -> Lsn:
    """The LSN of the mark. Raises ConfigurationError unless both sides have the same one."""
    one, other = blue.mark.lsn, green.mark.lsn
    if one != other:
        raise ConfigurationError(
            f"the mark {blue.mark.name} is at {one} of {blue.config.name}, and at {other} of"
            f" {green.config.name}: they are two moments.",
            _SAME,
        )
    return one


def both(blue: Side, green: Side, wanted: Sequence[TableId]) -> list[TableId]:
    """``wanted``, or all tables that either side had at the mark, by name."""
    return [*wanted] if wanted else sorted({*blue.tables, *green.tables}, key=str)
