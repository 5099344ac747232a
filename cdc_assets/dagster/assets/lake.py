"""The lake tables of a source: one operation that drains the logs of all that have something in it.

A run is one worker among others: it goes round its share of the tables
(``materializer.workers.turns``) until nothing has been pending for some minutes, or its budget is
over: to wait is far cheaper than to launch, and a change that comes then waits for a merge alone. A
run older than RELIEF_SECONDS ends as soon as its successor has started, so no change waits for a
launch. A table whose copy is completed meanwhile joins in. A table that can't go on doesn't stop
the others: the run leaves its name as a tag for the sensor, is relieved sooner, and fails at its
end, naming it. Tables are reported while the run goes on (``reports``), or a busy one would look
stale. How a log is applied is in ``materializer.drain``.
"""

# No postponed annotations here: Dagster looks at the type of `context` itself.
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import dagster as dg

from cdc_assets.config.source import SourceConfig
from cdc_assets.dagster.assets.reports import Reports
from cdc_assets.dagster.metadata import definition_metadata
from cdc_assets.dagster.names import WORK_TAG, TableAssets, failed_tag, operation_name, run_lock
from cdc_assets.dagster.resources.reported import run_of
from cdc_assets.dagster.resources.spark import spark_session
from cdc_assets.errors import TablePaused, TableProblem, TablesFailed
from cdc_assets.lake.spark.session import lost_server
from cdc_assets.log.asked.marks import marked_tables
from cdc_assets.log.asked.wishes import paused
from cdc_assets.log.states import TableState
from cdc_assets.log.store import LogStore
from cdc_assets.materializer.schema.ahead import Altered
from cdc_assets.materializer.workers.turns import Turn, Turns
from cdc_assets.materializer.workers.worker import Worker
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.process.traces import noted
from cdc_assets.readiness.surroundings import admitted

# The age at which a run's successor is asked for, and takes over. A launch costs about 5 s of CPU,
# so 0.5 % at the most. New code doesn't wait for it: its code server ends the old one's runs.
RELIEF_SECONDS = 900.0
# The same of a run by hand, whose end a person waits for, of one with a table that can't go on (it
# is tried again, and people told, at the run's end), and where another run or table waits.
SHORT_RELIEF_SECONDS = 180.0
# A launch takes some seconds, some dozens on a machine that is too busy; then a run ends without.
GRACE_SECONDS = 60.0
# Waiting this long for more is cheaper than launching the next run for it.
LINGER_SECONDS = 300.0
# The same of such runs.
SHORT_LINGER_SECONDS = 10.0
_LOOK_SECONDS = 0.5


def relief_seconds(*, soon: bool) -> float:
    """The age at which a run is relieved; ``soon``: somebody waits for its end."""
    return min(RELIEF_SECONDS, SHORT_RELIEF_SECONDS) if soon else RELIEF_SECONDS


def lake_spec(names: TableAssets) -> dg.AssetSpec:
    """``<namespace>/<table>``: the Iceberg table."""
    freshness = names.config.table(names.table).freshness
    return names.spec(
        names.lake,
        {"spark", "iceberg"},
        f"{names.table} as an Iceberg table: its copy with every later change applied.",
        deps=[names.snapshot, names.staged_log],
        metadata=definition_metadata(names),
        freshness_policy=dg.FreshnessPolicy.time_window(
            fail_window=freshness.fail, warn_window=freshness.warn
        ),
    )


def lake_assets(config: SourceConfig, tables: Sequence[TableAssets]) -> dg.AssetsDefinition:
    """The operation ``materialize__<source>`` over the lake tables."""
    resource = f"spark_{config.name}"

    @dg.multi_asset(
        name=operation_name(config.name, "materialize"),
        specs=[lake_spec(names) for names in tables],
        can_subset=True,
        required_resource_keys={resource},
    )
    @run_of(config)
    def materialize(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult[None]]:
        selected = [names for names in tables if names.lake in context.selected_asset_keys]
        spark = getattr(context.resources, resource)
        session = admitted(config, lambda: spark_session(spark, config))
        with Pipeline.open(config) as pipeline:
            pipeline.store.lock(run_lock(context.run.run_id))
            with (
                Worker(pipeline, [names.table for names in selected]) as worker,
                Turns(pipeline, session, worker, context.log.info) as turns,
            ):
                altered = Altered(pipeline, [names.table for names in selected])
                yield from Rounds(context, config, pipeline.store, turns, altered, selected).run()

    return materialize


class Rounds:
    """Going round the tables of one run."""

    def __init__(
        self,
        context: dg.AssetExecutionContext,
        config: SourceConfig,
        store: LogStore,
        turns: Turns,
        altered: Altered,
        tables: Sequence[TableAssets],
    ) -> None:
        self._context = context
        self._store = store
        self._turns = turns
        self._altered = altered
        self._tables = {names.table: names for names in tables}
        self._reports = Reports(config, store, tables, context.log_event)
        self._problems: dict[TableId, TableProblem] = {}
        # A run by hand looks at every table, and reports each once at the end. A run of the
        # sensor's reports a table without any event at once, and leaves idle tables alone.
        self._by_hand = by_hand = WORK_TAG not in context.run.tags
        reported = self._with_events()
        self._known = set[TableId]() if by_hand else reported
        self._new = set[TableId]() if by_hand else set(self._tables) - reported
        # Tables of other workers are reported once applied up to here, and again when they go on.
        self._awaited = {table: store.log_end(table) for table in set(self._tables) - self._known}
        self._began = time.monotonic()
        self._is_wanted = False
        self._looked_around_at = self._began

    def _with_events(self) -> set[TableId]:
        keys = [names.lake for names in self._tables.values()]
        last = self._context.instance.get_latest_materialization_events(keys)
        return {table for table, names in self._tables.items() if last.get(names.lake) is not None}

    def run(self) -> Iterator[dg.MaterializeResult[None]]:
        """Drain until it is quiet or the budget is over, and yield the last report of each table.

        Earlier reports are events of their own. Raises TablesFailed at the end.
        """
        self._say_who_cant()
        quiet_since = time.monotonic()
        over = False
        while not (over := over or self._over()) or self._turns.busy:
            if over:
                self._turns.end()
            pending = [] if over else self._pending()
            for table in [table for table in pending if table in self._new]:
                self._introduce(table)
            self._say_what_others_did()
            for table in pending:
                if not self._turns.start(table, self._altered.look(table)):
                    break
                self._known.add(table)
                self._altered.tried(table)
                self._awaited.pop(table, None)
            done = self._turns.wait(_LOOK_SECONDS)
            for turn in done:
                self._take(turn)
            self._reports.tell_due()
            waits = self._turns.waits or self._waits()
            if pending or done or self._turns.busy or waits:
                quiet_since = time.monotonic()
            elif self._is_idle(time.monotonic() - quiet_since):
                break
        yield from self._reports.rest()
        self._finish()

    def _over(self) -> bool:
        late = time.monotonic() - self._began - relief_seconds(soon=self._is_awaited())
        return late >= GRACE_SECONDS or (late >= 0 and self._turns.relieved)

    def _is_idle(self, quiet_seconds: float) -> bool:
        """Whether to end after so long without anything to do."""
        return quiet_seconds > (SHORT_LINGER_SECONDS if self._is_awaited() else LINGER_SECONDS)

    def _is_awaited(self) -> bool:
        """Whether a person waits for the run's end, a run for its place, or a table for a run."""
        if self._by_hand or self._problems:
            return True
        if time.monotonic() - self._looked_around_at >= SHORT_LINGER_SECONDS:
            self._looked_around_at = time.monotonic()
            queued = dg.RunsFilter(statuses=[dg.DagsterRunStatus.QUEUED])
            others = {b.table for b in self._store.backlogs() if b.rows} - set(self._tables)
            self._is_wanted = bool(
                others - set(paused(self._store)) or self._context.instance.get_runs_count(queued)
            )
        return self._is_wanted

    def _waits(self) -> bool:
        """Whether other workers still have to do what this run was asked for."""
        return any(
            table in self._turns.offsets and table not in self._problems for table in self._awaited
        )

    def _say_who_cant(self) -> None:
        for row in self._store.tables():
            if row.table in self._tables and row.state == TableState.PARKED:
                self._fail(TableProblem(row.table, row.reason or "it is parked"))
            elif row.table in self._tables and row.state != TableState.STREAMING:
                self._context.log.info("%s is %s; it joins once copied", row.table, row.state)

    def _pending(self) -> list[TableId]:
        """The tables with something to be applied or reported, the longest waiting first."""
        wants = set(self._tables) - set(self._problems) - set(paused(self._store))
        altered = self._altered.tables()
        unknown = wants - self._known
        asked = marked_tables(self._store) | (unknown if self._by_hand else set())
        return self._turns.pending(wants, also=unknown | (altered & wants), asked=asked)

    def _say_what_others_did(self) -> None:
        for table, offset in self._turns.offsets.items():
            if table not in self._turns.mine:
                arrived = table in self._awaited and offset >= self._awaited[table]
                if arrived:
                    del self._awaited[table]
                with self._blamed():
                    if self._reports.of_other(table, offset, at_once=arrived):
                        self._new.discard(table)
                        self._awaited.pop(table, None)

    def _introduce(self, table: TableId) -> None:
        self._new.discard(table)
        with self._blamed():
            self._reports.introduce(table)

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        """Take a problem of the block as one of its table."""
        try:
            yield
        except TableProblem as problem:
            self._fail(problem)

    def _take(self, turn: Turn) -> None:
        """Take note of what a turn did."""
        table = turn.table
        if isinstance(turn.error, TablePaused):
            self._context.log.info("%s", turn.error)
        elif isinstance(turn.error, TableProblem):
            self._fail(turn.error)
        elif turn.error is not None and lost_server(turn.error):
            raise turn.error  # no table is to blame
        elif turn.error is not None:  # whatever one table has must not stop the others
            self._fail(TableProblem(table, noted(turn.error)))
        elif turn.drained is None:
            self._context.log.info("%s: another worker is at it", table)
        elif turn.drained.moved or self._by_hand:
            self._reports.add(turn.drained)

    def _fail(self, problem: TableProblem) -> None:
        self._context.log.error(str(problem))
        assert isinstance(problem.table, TableId)
        self._problems[problem.table] = problem
        # At once: the sensor relieves a run with this tag sooner.
        self._context.instance.add_run_tags(self._context.run.run_id, failed_tag(self._problems))

    def _finish(self) -> None:
        if self._problems:
            raise TablesFailed(list(self._problems.values()))
