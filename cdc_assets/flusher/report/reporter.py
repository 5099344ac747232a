"""A flusher's reports: a line in its log, a row in the coordination database, metrics.

The reporter has a thread and connections of its own and lives as long as the flusher, over all its
sessions, so it can report that the stream is down. It never holds up the stream: a database that
doesn't answer costs a report.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Any

import psycopg
from prometheus_client.registry import Collector

from cdc_assets.config.addresses import source_dsn
from cdc_assets.config.source import SourceConfig
from cdc_assets.flusher.progress import Probe, Progress, report
from cdc_assets.flusher.report.looks import Looks
from cdc_assets.flusher.report.metrics import FlusherCollector
from cdc_assets.flusher.report.pipeline import PipelineCollector
from cdc_assets.flusher.report.probes import live, ready
from cdc_assets.flusher.report.server import MetricsServer
from cdc_assets.log.sessions.connection import connect_log
from cdc_assets.postgres.session.connect import connect
from cdc_assets.postgres.session.kept import KeptConnection
from cdc_assets.postgres.slots import current_position, slot_status
from cdc_assets.process.children import process_name
from cdc_assets.process.helper_thread import HelperThread

logger = logging.getLogger(__name__)

# Interval of probes of the source; also the precision of the lag in seconds.
PROBE_SECONDS = 2.0
# Intervals of log lines for a person who watches: while changes come, and while none do.
LINE_SECONDS, QUIET_SECONDS = 10.0, 60.0
# A probe or a report that takes longer is out of date.
_TIMEOUT = "5s"

_WRITE = """
insert into flusher_reports as r (source, report) values (%s, %s) on conflict (source)
    do update set report = excluded.report, reported_at = clock_timestamp()
"""


class Health:
    """Probes the source and reports ``progress`` until it is closed."""

    def __init__(self, config: SourceConfig, progress: Progress) -> None:
        self._config = config
        self._progress = progress
        self._probe = Probe()
        self._process = process_name()
        self._heard: float | None = None  # when a report last got into the log; monotonic
        self._looks = Looks(config, progress.note)
        collectors: list[Collector] = [
            PipelineCollector(config, self._looks, progress, self._probe)
        ]
        if config.streams:  # else there is nothing of its own to tell, and no alarm of it
            by_table = config.metrics.tables
            collectors.append(
                FlusherCollector(config.name, progress, self._probe, by_table=by_table)
            )
        self._metrics = MetricsServer(
            config.metrics,
            collectors,
            {
                "/live": lambda: live(progress, time.monotonic()),
                "/ready": lambda: ready(config, progress, self._heard, time.monotonic()),
            },
            progress.note,
        )
        self._source = KeptConnection(self._connect_source)
        self._log = KeptConnection(self._connect_log)
        self._line_rows, self._line_at = progress.rows, time.monotonic()
        self._thread = HelperThread(
            "health", self._step, PROBE_SECONDS, at_end=self._last, note=progress.note
        )
        progress.on_state = self._thread.soon

    def start(self) -> None:
        self._thread.start()
        self._looks.start()

    def close(self) -> None:
        """Report the end, if the databases answer."""
        self._thread.close()
        self._metrics.close()
        self._looks.close()

    def _step(self) -> None:
        self._metrics.ensure()
        if self._progress.state == "starting" or self._progress.waits:
            # Another flusher reports this source, whatever becomes of this one. What this one saw
            # while it had the turn is no news, and its age would be told as a lag.
            self._probe.forget()
            return
        try:
            self._look()
        finally:
            self._tell()

    def _last(self) -> None:
        try:
            self._step()
        finally:
            self._source.close()
            self._log.close()

    def _look(self) -> None:
        with self._source.use() as source:
            slot = slot_status(source, self._config.slot)
            self._probe.saw(time.monotonic(), current_position(source))
        self._probe.retained_bytes = slot.retained_bytes if slot is not None else 0
        self._probe.wal_status = slot.wal_status if slot is not None else None

    def _tell(self) -> None:
        now = time.monotonic()
        told = report(self._process, self._progress, self._probe, now)
        quiet = self._progress.rows == self._line_rows
        if now - self._line_at >= (QUIET_SECONDS if quiet else LINE_SECONDS):
            rate = (self._progress.rows - self._line_rows) / (now - self._line_at)
            logger.info("%s; %.0f rows/s", told.sentence, rate)
            self._line_rows, self._line_at = self._progress.rows, now
        with self._log.use() as log:
            log.execute(_WRITE, (self._config.name, json.dumps(told.to_json())))
        self._heard = time.monotonic()

    def _connect_source(self) -> psycopg.Connection[Any]:
        name = f"cdc_assets {self._config.name} health"
        source = connect(source_dsn(self._config), application_name=name)
        source.execute(f"set statement_timeout = '{_TIMEOUT}'")
        return source

    def _connect_log(self) -> psycopg.Connection[Any]:
        log = connect_log(self._config, "report")
        log.execute(f"set statement_timeout = '{_TIMEOUT}'")
        return log
