"""What a flusher tells: a line in its log, a report in the coordination database, metrics.

It has a thread and connections of its own and lives as long as the flusher, over all its sessions:
while the stream is down it is what says so. It never holds up the stream; a database that doesn't
answer costs a report.
"""

from __future__ import annotations

import json
import logging
import threading
import time

import psycopg

from cdc_assets.config import SourceConfig
from cdc_assets.flusher.metrics import FlusherCollector, MetricsServer
from cdc_assets.flusher.report import Probe, Progress, Report, report
from cdc_assets.pipeline import connect_log, source_dsn
from cdc_assets.postgres.connect import connect
from cdc_assets.postgres.replication import current_position, slot_status
from cdc_assets.process import process_name

logger = logging.getLogger(__name__)

# How often the source is asked how far it is; also how exact the lag in seconds is.
PROBE_SECONDS = 2.0
# A line for a person who watches.
LINE_SECONDS = 10.0
# A probe or a report that takes longer tells nothing new.
_TIMEOUT = "5s"
# The end of the flusher doesn't wait for a database that doesn't answer.
_JOIN_SECONDS = 3.0

_WRITE = """
insert into flusher_reports as r (source, report) values (%s, %s) on conflict (source)
    do update set report = excluded.report, reported_at = clock_timestamp()
"""


class Health:
    """Probes the source and tells about ``progress`` until it is closed."""

    def __init__(self, config: SourceConfig, progress: Progress) -> None:
        self._config = config
        self._progress = progress
        self._probe = Probe()
        self._process = process_name()
        self._metrics = MetricsServer(
            config.metrics, FlusherCollector(config.name, progress, self._probe)
        )
        self._source: psycopg.Connection[tuple[object, ...]] | None = None
        self._log: psycopg.Connection[tuple[object, ...]] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="health", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Tell the end, if the databases answer."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_SECONDS)
        self._metrics.close()

    def _run(self) -> None:
        rows, line_at = self._progress.rows, time.monotonic()
        over = False
        while not over:
            over = self._stop.wait(PROBE_SECONDS)
            self._metrics.ensure()
            if self._progress.state in ("starting", "waiting"):
                continue  # the source is another flusher's to tell about
            self._look()
            now = time.monotonic()
            told = report(self._process, self._progress, self._probe, now)
            self._write(told)
            if now - line_at >= LINE_SECONDS:
                rate = (self._progress.rows - rows) / (now - line_at)
                logger.info("%s; %.0f rows/s", told.sentence, rate)
                rows, line_at = self._progress.rows, now
        for connection in (self._source, self._log):
            if connection is not None:
                connection.close()

    def _look(self) -> None:
        try:
            if self._source is None:
                name = f"cdc_assets {self._config.name} health"
                self._source = connect(source_dsn(self._config), application_name=name)
                self._source.execute(f"set statement_timeout = '{_TIMEOUT}'")
            slot = slot_status(self._source, self._config.slot)
            self._probe.saw(time.monotonic(), current_position(self._source))
        except psycopg.Error as error:
            logger.debug("the source doesn't answer: %s", error)
            if self._source is not None:
                self._source.close()
            self._source = None
            return
        self._probe.retained_bytes = slot.retained_bytes if slot is not None else 0
        self._probe.wal_status = slot.wal_status if slot is not None else None

    def _write(self, told: Report) -> None:
        try:
            if self._log is None:
                self._log = connect_log(self._config, "report")
                self._log.execute(f"set statement_timeout = '{_TIMEOUT}'")
            self._log.execute(_WRITE, (self._config.name, json.dumps(told.to_json())))
        except psycopg.Error as error:
            logger.debug("no report could be written: %s", error)
            if self._log is not None:
                self._log.close()
            self._log = None
