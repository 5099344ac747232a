"""Copies, merges, care, pins, backlog and freshness of a source, as Prometheus's metrics.

They are done by other processes, so the figures are those of the coordination database
(``looks``); what is to be asked of the source, the flusher has asked already. Without figures there
is ``coordination_up`` alone, and it is 0: nothing old is told as new. Series don't grow with the
tables unless told to.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cdc_assets.config.source import SourceConfig
from cdc_assets.flusher.progress import Probe, Progress
from cdc_assets.flusher.report.looks import Looks
from cdc_assets.log.figures.work import Work
from cdc_assets.log.groups.standing import GroupStatus
from cdc_assets.log.states import LOGGED, TableState
from cdc_assets.observe.figures.look import PIN_KINDS, Figures
from cdc_assets.observe.figures.rows import TableFacts

_PREFIX = "cdc_assets_"
_WORK: Mapping[str, tuple[str, Callable[[Work], float]]] = {
    "": ("Chunks copied, merges, and turns of care of a table.", lambda work: work.count),
    "_rows": ("Rows copied, changes merged.", lambda work: work.rows),
    "_bytes": ("Bytes copied, of merged files, removed by care.", lambda work: work.bytes),
    "_seconds": ("Time it took, of all processes.", lambda work: work.seconds),
}

Series = Iterable[tuple[tuple[str, ...], float | None]]
"""Values by their labels after the source's; without a value there is no series."""


class PipelineCollector(Collector):
    """Turns the last look into metrics when it is asked."""

    def __init__(
        self, config: SourceConfig, looks: Looks, progress: Progress, probe: Probe
    ) -> None:
        self._config = config
        self._looks = looks
        self._progress = progress
        self._probe = probe

    def collect(self) -> Iterator[Metric]:
        figures = self._looks.latest()
        up = float(figures is not None)
        yield self._gauge("coordination_up", "Whether the figures below could be had.", up)
        if figures is None:
            return
        tables = {
            t.name: figures.tables[t.name] for t in self._config.tables if t.name in figures.tables
        }
        lags = self._lags(tables)
        yield from self._tables(figures, tables, lags)
        yield from self._copies(tables)
        yield from self._backlog(tables)
        yield from self._work(figures.work)
        yield from self._pins(figures)
        yield from self._groups(figures.groups)
        if self._config.maintenance.every is not None:
            yield self._gauge(
                "maintenance_idle_seconds",
                "How long ago care of any table was through.",
                figures.maintenance_idle_seconds,
            )
        if self._config.metrics.tables:
            yield from self._each(tables, lags)

    def _lags(self, tables: Mapping[str, TableFacts]) -> dict[str, float]:
        progress, probe = self._progress, self._probe
        level = max(progress.level, progress.flushed)
        behind, found = probe.lag_seconds(time.monotonic(), level), dict[str, float]()
        for name, table in tables.items():
            position = table.position(level)
            lag = table.lag_seconds(position, probe.current, behind)
            if lag is not None:
                found[name] = lag
        return found

    def _tables(
        self, figures: Figures, tables: Mapping[str, TableFacts], lags: Mapping[str, float]
    ) -> Iterator[Metric]:
        states = Counter(table.state for table in tables.values())
        states["new"] = len(self._config.tables) - len(tables)
        names = ("new", *TableState)
        yield self._family(
            "tables", "Tables by state.", (((n,), states[n]) for n in names), "state"
        )
        failing = sum(table.present_problem(altered=False) is not None for table in tables.values())
        yield self._gauge("failing_tables", "Tables whose log can't be applied.", failing)
        yield self._gauge("paused_tables", "Tables that are paused.", len(figures.paused))
        worst = max(lags.values(), default=None)
        yield self._gauge("lag_seconds", "How far the oldest lake table is behind.", worst)
        late = Counter[str]()
        for name in lags.keys() - figures.paused:
            freshness = self._config.table(name).freshness
            late["warn"] += lags[name] > freshness.warn.total_seconds()
            late["fail"] += lags[name] > freshness.fail.total_seconds()
        yield self._family(
            "late_tables",
            "Tables that are further behind than their freshness.warn, or fail.",
            (((level,), late[level]) for level in ("warn", "fail")),
            "level",
        )

    def _copies(self, tables: Mapping[str, TableFacts]) -> Iterator[Metric]:
        found = tables.values()
        yield self._gauge("copy_chunks", "In the plans.", sum(t.chunks_total for t in found))
        done = sum(t.chunks_done for t in found)
        yield self._gauge("copy_chunks_done", "Of these, in the lake.", done)
        rows = sum(t.rows_copied for t in found)
        yield self._gauge("copy_rows_done", "Rows of these.", rows)
        yield self._gauge(
            "copy_idle_seconds",
            "For how long nothing was written of the copy that waits longest.",
            max((t.copy_idle_seconds for t in found if t.copy_idle_seconds is not None), default=0),
        )

    def _backlog(self, tables: Mapping[str, TableFacts]) -> Iterator[Metric]:
        waiting = [table for table in tables.values() if table.state in LOGGED]
        ages = (t.waiting_seconds for t in waiting if t.waiting_seconds is not None)
        for name, documentation, value in (
            (
                "entries",
                "Entries of the log that aren't applied.",
                sum(t.pending_entries for t in waiting),
            ),
            ("rows", "Changes in them.", sum(t.pending_rows for t in waiting)),
            ("bytes", "Their bytes.", sum(t.pending_bytes for t in waiting)),
            ("oldest_seconds", "The age of the oldest change of them.", max(ages, default=0.0)),
        ):
            yield self._gauge(f"backlog_{name}", documentation, value)

    def _work(self, done: Iterable[Work]) -> Iterator[Metric]:
        for suffix, (documentation, value) in _WORK.items():
            family = CounterMetricFamily(
                f"{_PREFIX}work{suffix}", documentation, labels=("source", "kind", "outcome")
            )
            for work in done:
                family.add_metric((self._config.name, work.kind, work.outcome), value(work))
            yield family

    def _groups(self, found: Iterable[GroupStatus]) -> Iterator[Metric]:
        for name, documentation, value in (
            ("lag_seconds", "The age of what it hasn't read.", lambda g: g.lag_seconds or 0.0),
            ("pending_rows", "Changes that it hasn't read.", lambda g: g.pending_rows),
            ("held_bytes", "Staged, and kept for it alone.", lambda g: g.held_bytes),
            ("processes", "Processes that read for it.", lambda g: len(g.processes)),
        ):
            series = (((group.name,), value(group)) for group in found)
            yield self._family(f"group_{name}", documentation, series, "group")

    def _pins(self, figures: Figures) -> Iterator[Metric]:
        pins = {pin.kind: pin for pin in figures.pins}
        current = self._probe.current
        counts = (((kind,), pins[kind].count if kind in pins else 0) for kind in PIN_KINDS)
        yield self._family("pins", "Pins that tables are copied under.", counts, "kind")
        ages = (((kind,), pin.oldest_seconds) for kind, pin in pins.items())
        yield self._family("pin_age_seconds", "The age of the oldest one.", ages, "kind")
        # Before the first look at the source nothing is known of its WAL.
        wal = (((k,), max(0, current - pin.point)) for k, pin in pins.items() if int(current))
        yield self._family(
            "pin_wal_bytes", "WAL since the oldest one, whose changes wait in the log.", wal, "kind"
        )

    def _each(
        self, tables: Mapping[str, TableFacts], lags: Mapping[str, float]
    ) -> Iterator[Metric]:
        for name, documentation, value in (
            ("lag_seconds", "How far it is behind.", lambda table: lags.get(table.name)),
            ("backlog_rows", "Changes that aren't applied.", lambda table: table.pending_rows),
            ("copy_chunks", "In its plan.", lambda table: table.chunks_total),
            ("copy_chunks_done", "Of these, in the lake.", lambda table: table.chunks_done),
            ("copy_rows_done", "Rows of these.", lambda table: table.rows_copied),
        ):
            series = (((table.name,), value(table)) for table in tables.values())
            yield self._family(f"table_{name}", documentation, series, "table")

    def _gauge(self, name: str, documentation: str, value: float | None) -> Metric:
        return self._family(name, documentation, [((), value)])

    def _family(self, name: str, documentation: str, series: Series, *labels: str) -> Metric:
        family = GaugeMetricFamily(f"{_PREFIX}{name}", documentation, labels=("source", *labels))
        for values, value in series:
            if value is not None:
                family.add_metric((self._config.name, *values), value)
        return family
