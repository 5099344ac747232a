"""What the flusher counts itself, as Prometheus's metrics.

The names and units follow Prometheus's conventions; every metric carries the source's name. The
numbers are read when somebody scrapes: nothing is kept twice.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    StateSetMetricFamily,
)
from prometheus_client.registry import Collector

from cdc_assets.flusher.progress import FLUSH_BOUNDS, OPERATIONS, STATES, Probe, Progress

_PREFIX = "cdc_assets_flusher_"
# As pg_replication_slots has it.
_WAL_STATUSES = ("reserved", "extended", "unreserved", "lost")


class FlusherCollector(Collector):
    """Turns ``progress`` and the last ``probe`` into metrics when it is asked."""

    def __init__(
        self, source: str, progress: Progress, probe: Probe, *, by_table: bool = False
    ) -> None:
        self._source = source
        self._progress = progress
        self._probe = probe
        self._by_table = by_table

    def collect(self) -> Iterator[Metric]:
        progress, probe, now = self._progress, self._probe, time.monotonic()
        level = max(progress.level, progress.flushed)
        yield self._states("state", "What it does now.", STATES, progress.state)
        yield self._gauge("received_lsn", "The last LSN that arrived.", int(progress.received))
        yield self._gauge("staged_lsn", "All below it is in the log.", int(progress.flushed))
        yield self._gauge(
            "acknowledged_lsn", "All below it the server may forget.", int(progress.acknowledged)
        )
        yield self._gauge("lag_bytes", "WAL that the log doesn't show yet.", probe.lag_bytes(level))
        yield self._gauge(
            "lag_seconds",
            "How long ago the log was level with the source.",
            probe.lag_seconds(now, level),
        )
        yield self._gauge("retained_wal_bytes", "WAL that the slot keeps.", probe.retained_bytes)
        yield self._states("wal_status", "Of the slot.", _WAL_STATUSES, probe.wal_status)
        yield self._counter("reconnects", "Streams begun anew.", progress.reconnects)
        yield self._counter(
            "staging_retries", "Tries to store a file that failed.", progress.staging_retries
        )
        yield from self._changes()
        yield self._durations()

    def _changes(self) -> Iterator[Metric]:
        labels = ("source", "table") if self._by_table else ("source",)
        changes = CounterMetricFamily(
            f"{_PREFIX}changes", "Changes that are in the log.", labels=(*labels, "operation")
        )
        staged = CounterMetricFamily(
            f"{_PREFIX}staged_bytes", "Bytes of staged files.", labels=labels
        )
        if self._by_table:
            for (table, operation), count in sorted(self._progress.changes.copy().items()):
                changes.add_metric((self._source, table, OPERATIONS[operation]), count)
            for table, size in sorted(self._progress.bytes_by_table.copy().items()):
                staged.add_metric((self._source, table), size)
        else:
            counts = Counter[str]()
            for (_, operation), count in self._progress.changes.copy().items():
                counts[operation] += count
            for operation, name in OPERATIONS.items():
                changes.add_metric((self._source, name), counts[operation])
            staged.add_metric((self._source,), self._progress.staged_bytes)
        yield changes
        yield staged

    def _durations(self) -> Metric:
        durations = self._progress.durations
        buckets, below = list[tuple[str, float]](), 0
        for bound, count in zip((*FLUSH_BOUNDS, float("inf")), durations.counts, strict=True):
            below += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), below))
        family = HistogramMetricFamily(
            f"{_PREFIX}flush_seconds", "From staging to registration.", labels=("source",)
        )
        family.add_metric((self._source,), buckets, durations.total_seconds)
        return family

    def _gauge(self, name: str, documentation: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"{_PREFIX}{name}", documentation, labels=("source",))
        family.add_metric((self._source,), value)
        return family

    def _counter(self, name: str, documentation: str, value: float) -> Metric:
        family = CounterMetricFamily(f"{_PREFIX}{name}", documentation, labels=("source",))
        family.add_metric((self._source,), value)
        return family

    def _states(
        self, name: str, documentation: str, known: tuple[str, ...], current: str | None
    ) -> Metric:
        family = StateSetMetricFamily(f"{_PREFIX}{name}", documentation, labels=("source",))
        family.add_metric((self._source,), {state: state == current for state in known})
        return family
