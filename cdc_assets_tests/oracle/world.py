"""One plan played on real servers, and what is wrong at its end.

Everything that happens to the pipeline in production happens here: it is started, killed, cut off,
paused, maintained, resynced, and others meddle with its lake tables and its publication. An action
may fail (its target was killed, a table is parked): what counts is how it ends. Then the pipeline
gets whatever it asks for, each table that it has set aside a ``resync``, and the lake is judged.
"""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

import psycopg
from psycopg import sql
from pyspark.errors import PySparkException

from cdc_assets.errors import CdcError, SourceMismatch, TableProblem, TablesFailed
from cdc_assets.flusher.reach import reach
from cdc_assets.operations import copying
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.slots import current_lsn
from cdc_assets_tests.oracle import record, tasks
from cdc_assets_tests.oracle.clients import Clients
from cdc_assets_tests.oracle.deeds import Deeds
from cdc_assets_tests.oracle.judge import Evidence, judge
from cdc_assets_tests.oracle.lake_rows import read
from cdc_assets_tests.oracle.plan import Action, Plan, Table
from cdc_assets_tests.oracle.servers import LAKE, LOG, Servers

# How often the pipeline is given what it asks for before it counts as stuck.
_TRIES = 6
_SECONDS = 120.0
# What may set a table aside: others meddled, or the change of a schema isn't one that is followed.
_CAUSES = frozenset({"rollback", "publication", "foreign care", "partition"})


class Stuck(Exception):
    """The pipeline doesn't come to an end."""


class World:
    """A source of its own, with its lake; ``counts`` is what happened how often."""

    def __init__(self, servers: Servers, plan: Plan, say: Callable[[str], None]) -> None:
        self.servers, self.plan, self._say = servers, plan, say
        self.source = f"seed_{plan.seed}"
        self.folder = servers.folder / self.source
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []

    def play(self) -> list[str]:
        """What is wrong at the end; nothing if nothing is."""
        self._open()
        try:
            for number, action in enumerate(self.plan.actions):
                self._say(f"{number} {_told(action)}")
                self.counts[action["do"]] += 1
                try:
                    self.deeds.do(action)
                except (CdcError, psycopg.Error, PySparkException, OSError) as error:
                    self.counts[f"{action['do']}: {type(error).__name__}"] += 1
                    self._say(f"  {type(error).__name__}: {str(error)[:300]}")
            self._say("settling")
            self.clients.wait()
            self.problems += [f"harm: {harm}" for harm in self.clients.harms[:3]]
            self._settle()
            self._say("judging")
            self._judge()
            self._say("closing")
        except Stuck as stuck:
            self.problems.append(f"stuck: {stuck}")
        finally:
            self.counts += self.clients.counts
            self._close()
        return self.problems

    # --- setting up ---

    def _open(self) -> None:
        self._drop_all()
        self.folder.mkdir(parents=True)
        self.servers.create(self.source)
        dsn = self.servers.database(self.source)
        with psycopg.connect(dsn, autocommit=True) as source:
            source.execute(record.SETUP.encode())
            for table in self.plan.tables:
                for statement in table.create():
                    source.execute(statement.encode())
            record.watch(source, self.source, self.plan.tables)
            for key, value in self.plan.database.items():
                source.execute(
                    sql.SQL("alter database {} set {} = {}").format(
                        sql.Identifier(self.source), sql.Identifier(key), sql.Literal(value)
                    )
                )
        file = self.folder / "source.json"
        file.write_text(json.dumps(self.servers.config(self.plan, self.source)))
        self.config = self.servers.parsed(self.plan, self.source)
        self.clients = Clients(dsn, self.plan.tables)
        self.deeds = Deeds(
            self.servers, self.plan, self.config, file, self.clients, self.counts, self.problems
        )

    def _close(self) -> None:
        self.deeds.stop(signal.SIGKILL)
        with suppress(psycopg.Error):
            self._drop_all()

    def _drop_all(self) -> None:
        self.servers.drop(self.source)
        with (
            suppress(psycopg.Error),
            psycopg.connect(self.servers.database(LAKE), autocommit=True) as lake,
        ):
            lake.execute("delete from iceberg_tables where table_namespace = %s", (self.source,))
        with (
            suppress(psycopg.Error),
            psycopg.connect(self.servers.database(LOG), autocommit=True) as log,
        ):
            log.execute("drop schema if exists _pg2iceberg cascade")
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self.servers.folder / "warehouse" / self.source, ignore_errors=True)

    # --- the end ---

    def _settle(self) -> None:
        """Everything is applied; what was set aside is copied anew."""
        deadline = time.monotonic() + _SECONDS
        refused = {
            t for t, table in zip(self.deeds.tables, self.plan.tables, strict=True) if table.refused
        }
        last, before = "", list[str]()
        for _ in range(_TRIES):
            if time.monotonic() > deadline or before.count(last) > 1:
                break
            before.append(last)
            try:
                self.deeds.start()
                with self.deeds.pipeline() as pipeline:
                    self.deeds.resume(pipeline)
                    self._heal(pipeline, refused)
                    failed = self._caught_up(pipeline, refused)
                    again = self._parked(pipeline, refused)
                    if not failed and not again:
                        return
                    last = str(failed or again)
                    self._say(f"  not yet: {last[:600]}")
            except SourceMismatch as error:
                last = str(error)
                self._anew(", ".join(error.codes))
            except (CdcError, psycopg.Error, PySparkException) as error:
                last = f"{type(error).__name__}: {error}"
                self._say(f"  {last[:600]}")
            if self.deeds.flusher_ended:
                self.counts["the flusher ended by itself"] += 1
        raise Stuck(last[:1500])

    def _anew(self, codes: str) -> None:
        """All tables are copied anew, as the message says: fresh copies hide what was wrong."""
        self.counts[f"resync --all: {codes}"] += 1
        self._say(f"  resync of all: {codes}")
        self.deeds.stop(signal.SIGTERM)
        with suppress(CdcError, psycopg.Error), self.deeds.pipeline() as pipeline:
            copying.mark_for_copy(pipeline, self.deeds.tables)

    def _parked(self, pipeline: Pipeline, refused: set[TableId]) -> dict[str, str]:
        return {
            str(row.table): row.reason or ""
            for row in pipeline.store.tables()
            if row.state == "parked" and row.table not in refused
        }

    def _heal(self, pipeline: Pipeline, refused: set[TableId]) -> None:
        parked = self._parked(pipeline, refused)
        for name, reason in parked.items():
            table = self.plan.tables[self.deeds.tables.index(TableId.parse(name))]
            self.counts["parked, then resynced"] += 1
            self._say(f"  resync of {name}: {reason[:300]}")
            meddled = any(action["do"] in _CAUSES for action in self.plan.actions)
            meddled |= self.plan.odd_keys and "belongs to its key" in reason
            if not meddled and not table.touched:
                self.problems.append(f"parked without a cause: {name}: {reason[:500]}")
            copying.mark_for_copy(pipeline, [TableId.parse(name)])

    def _caught_up(self, pipeline: Pipeline, refused: set[TableId]) -> str:
        """Copy, flush, merge all; what failed of tables that aren't refused."""
        problems: list[TableProblem] = []
        try:
            self._say("  copying")
            tasks.copy(pipeline, self.deeds.spark, self.deeds.tables)
        except TablesFailed as failed:
            problems += failed.problems
        bad = {problem.table for problem in problems}
        self._say("  flushing")
        with pipeline.connect_source("oracle") as source:
            reach(pipeline, current_lsn(source))
        self._say("  merging")
        try:
            tasks.merge(pipeline, self.deeds.spark, [t for t in self.deeds.tables if t not in bad])
        except TablesFailed as failed:
            problems += failed.problems
        return "; ".join(str(p) for p in problems if p.table not in refused)

    def _judge(self) -> None:
        dsn = self.servers.database(self.source)
        with psycopg.connect(dsn, autocommit=True) as source, self.deeds.pipeline() as pipeline:
            history = record.history(source, self.source)
            states = {row.table: row for row in pipeline.store.tables()}
            for number, (table, named) in enumerate(
                zip(self.plan.tables, self.deeds.tables, strict=True)
            ):
                row = states[named]
                if table.refused and row.state == "parked":
                    self.counts["refused, as it should be"] += 1
                    continue
                lake = read(
                    self.servers.catalog_uri,
                    self.servers.warehouse,
                    self.source,
                    self.config.lake_name(named),
                )
                if lake is None:
                    self.problems.append(f"no lake table: {named}")
                    continue
                evidence = Evidence(
                    number,
                    table,
                    record.columns(source, table),
                    record.rows(source, table),
                    history,
                    (row.snapshot_lsn or Lsn.ZERO).value,
                    *lake,
                )
                self.problems += [
                    f"{table.mode} {said} (table {named})" for said in judge(evidence)
                ]
                self._count(table, evidence)

    def _count(self, table: Table, evidence: Evidence) -> None:
        self.counts["tables compared"] += 1
        self.counts["rows compared"] += len(evidence.lake)
        self.counts[f"mode {table.mode}"] += 1
        self.counts[f"identity {table.identity}"] += 1
        self.counts[f"key of {len(table.key)}"] += 1
        self.counts["partitioned"] += bool(table.parts)
        for kind in table.columns.values():
            self.counts[f"type {kind}"] += 1
        for column in table.key:
            self.counts[f"key type {table.columns[column]}"] += 1


def _told(action: Action) -> str:
    """An action without its statements."""
    parts: Sequence[str] = [
        f"{key}={value}"
        for key, value in action.items()
        if key not in ("do", "transactions", "interleaved")
    ]
    return " ".join((action["do"], *parts))
