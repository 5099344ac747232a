"""What happens to a pipeline: its commands, kills and cuts, and what others do to its things."""

from __future__ import annotations

import multiprocessing.process
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import psycopg
from psycopg import sql
from pyiceberg.catalog import load_catalog

from cdc_assets.config.source import SourceConfig
from cdc_assets.log.asked import wishes as pauses
from cdc_assets.operations import copying
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.oracle import record, tasks
from cdc_assets_tests.oracle.clients import Clients
from cdc_assets_tests.oracle.plan import Action, Plan, name
from cdc_assets_tests.oracle.servers import LOG, Servers

_STOP_SECONDS = 30
_ALL = "insert, update, delete, truncate"


@dataclass(slots=True)
class Deeds:
    """Does a plan's actions to the source ``config``; its flusher is a process of its own."""

    servers: Servers
    plan: Plan
    config: SourceConfig
    config_file: Path
    clients: Clients
    counts: Counter[str]
    problems: list[str]
    tables: list[TableId] = field(init=False)
    spark: tasks.Shared = field(init=False)
    _flusher: multiprocessing.process.BaseProcess | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.tables = [TableId.parse(table.sql) for table in self.plan.tables]
        self.spark = tasks.Shared(self.config, self.servers.spark(self.config))

    @property
    def source(self) -> str:
        return self.config.name

    def do(self, action: Action) -> None:
        do = action["do"]
        if do == "traffic":
            self._traffic(action)
        elif do in tasks.WORK:
            self._work(do, action)
        elif do == "start":
            self.start()
        elif do == "stop":
            self.stop(signal.SIGTERM)
        elif do == "kill":
            time.sleep(action["after_ms"] / 1000)
            self.stop(signal.SIGKILL)
        elif do == "kill decoder":
            for child in self._flusher_children():
                child.kill()
        elif do == "cut":
            self._cut(action["what"])
        elif do == "resync":
            with self.pipeline() as pipeline:
                copying.mark_for_copy(pipeline, [self.tables[action["table"]]])
        elif do in ("pause", "resume"):
            self._pause(action)
        elif do == "log away":
            self._log_away(action["ms"])
        elif do == "foreign care":
            self._foreign_care(action)
        elif do == "rollback":
            self._rollback(action["table"])
        elif do == "publication":
            self._publication(action)
        elif do == "partition":
            self._partition(action)
        else:
            raise ValueError(do)

    def _traffic(self, action: Action) -> None:
        if "interleaved" in action:
            self.clients.run_interleaved(**action["interleaved"])
        elif action.get("beside"):
            self.clients.run_beside(action["transactions"])
        else:
            self.clients.run(action["transactions"])

    def _work(self, what: str, action: Action) -> None:
        tables = [self.tables[i] for i in action.get("tables", range(len(self.tables)))]
        if "killed_ms" in action:
            process = tasks.context().Process(
                target=tasks.child,
                args=(str(self.config_file), self._log(what), what, [str(t) for t in tables]),
            )
            process.start()
            process.join(action["killed_ms"] / 1000)
            self.counts[f"{what}: {'killed' if process.is_alive() else 'ended in time'}"] += 1
            process.kill()
            process.join()
            return
        with self.pipeline() as pipeline:
            if "share" in action:
                tasks.copy_share(pipeline, self.spark, tables, action["share"])
            else:
                tasks.WORK[what](pipeline, self.spark, tables)

    def start(self) -> None:
        if self._flusher is not None and self._flusher.is_alive():
            return
        self._flusher = tasks.context().Process(
            target=tasks.flusher, args=(str(self.config_file), self._log("flusher"))
        )
        self._flusher.start()

    @property
    def flusher_ended(self) -> bool:
        """By itself."""
        return self._flusher is not None and not self._flusher.is_alive()

    def stop(self, how: signal.Signals) -> None:
        flusher, self._flusher = self._flusher, None
        if flusher is None or flusher.pid is None:
            return
        with suppress(ProcessLookupError):
            os.kill(flusher.pid, how)
        flusher.join(_STOP_SECONDS)
        if flusher.is_alive():
            self.problems.append("no end: the flusher is still there 30 s after SIGTERM")
            flusher.kill()
            flusher.join()

    def _flusher_children(self) -> list[psutil.Process]:
        if self._flusher is None or self._flusher.pid is None:
            return []
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self._flusher.pid).children()
        return []

    def _cut(self, what: str) -> None:
        which = {
            "flusher": "backend_type = 'walsender'",
            "log": "application_name like 'cdc_assets %% log'",
            "pin": "application_name like 'cdc_assets %% pin'",
            "all": "application_name like 'cdc_assets %%'",
        }[what]
        with self._admin() as admin:
            admin.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                f" where datname in (%s, %s) and {which}".encode(),
                (self.source, LOG),
            )

    def _pause(self, action: Action) -> None:
        table = action.get("table")
        with self.pipeline() as pipeline:
            if action["do"] == "resume":
                self.resume(pipeline)
            else:
                pauses.pause(pipeline.store, self.tables[table] if table is not None else None)

    def resume(self, pipeline: Pipeline) -> None:
        for table in (None, *self.tables):
            pauses.resume(pipeline.store, table)

    def _log_away(self, milliseconds: int) -> None:
        """Nobody gets to the coordination database for that long."""
        database = sql.Identifier(LOG if self.plan.apart else self.source)
        with self._admin() as admin:
            admin.execute(sql.SQL("alter database {} allow_connections false").format(database))
            try:
                self._cut("all")
                time.sleep(milliseconds / 1000)
            finally:
                admin.execute(sql.SQL("alter database {} allow_connections true").format(database))

    def _foreign_care(self, action: Action) -> None:
        """Somebody else's maintenance, as a managed catalog does it."""
        name = self._procedure_name(action["table"])
        session = self.servers.spark(self.config)
        if action["compact"]:
            session.sql(
                f"call lake.system.rewrite_data_files(table => {name},"
                " options => map('rewrite-all', 'true'))"
            ).collect()
        if action["expire"]:
            session.sql(
                f"call lake.system.expire_snapshots(table => {name}, retain_last => 1,"
                " older_than => current_timestamp())"
            ).collect()

    def _rollback(self, table: int) -> None:
        catalog = load_catalog(
            "lake", type="sql", uri=self.servers.catalog_uri, warehouse=self.servers.warehouse
        )
        place = (self.source, self.config.lake_name(self.tables[table]))
        if not catalog.table_exists(place):
            return
        current = catalog.load_table(place).current_snapshot()
        if current is None or current.parent_snapshot_id is None:
            return
        name = self._procedure_name(table)
        self.servers.spark(self.config).sql(
            f"call lake.system.rollback_to_snapshot({name}, {current.parent_snapshot_id})"
        ).collect()
        self.counts["rolled back"] += 1

    def _procedure_name(self, table: int) -> str:
        name = self.config.lake_name(self.tables[table]).replace("`", "``")
        text = f"lake.`{self.source}`.`{name}`"
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    def _publication(self, action: Action) -> None:
        table, publication = self.plan.tables[action["table"]], f"cdc_{self.source}"
        there, back = {
            "operations": (
                f"alter publication {publication} set (publish = 'insert')",
                f"alter publication {publication} set (publish = '{_ALL}')",
            ),
            "via root": (
                f"alter publication {publication} set (publish_via_partition_root = false)",
                f"alter publication {publication} set (publish_via_partition_root = true)",
            ),
            "table": (
                f"alter publication {publication} drop table {table.sql}",
                f"alter publication {publication} add table {table.sql}",
            ),
            "unlogged": (
                f"alter table {table.sql} set unlogged",
                f"alter table {table.sql} set logged",
            ),
        }[action["how"]]
        dsn = self.servers.database(self.source)
        with psycopg.connect(dsn, autocommit=True) as owner:
            owner.execute("set lock_timeout = '5s'")
            owner.execute(there.encode())
            try:
                self.clients.run(action["transactions"])
            finally:
                owner.execute(back.encode())
        self.counts[f"publication: {action['how']}"] += 1

    def _partition(self, action: Action) -> None:
        """One is truncated by itself, or detached and attached again, which no stream tells of."""
        number = action["table"]
        table = self.plan.tables[number]
        part = table.parts[action["part"]]
        leaf = f"{name(table.schema)}.{name(part['name'])}"
        with psycopg.connect(self.servers.database(self.source)) as owner:
            owner.execute("set lock_timeout = '5s'")
            owner.execute(f"lock table {table.sql} in access exclusive mode".encode())
            record.note_all(owner, number, leaf, "D")
            if action["how"] == "truncate":
                owner.execute(f"truncate {leaf}".encode())
            else:
                owner.execute(f"alter table {table.sql} detach partition {leaf}".encode())
                owner.commit()
                self.clients.run(action["transactions"])
                record.note_all(owner, number, leaf, "I")
                owner.execute(
                    f"alter table {table.sql} attach partition {leaf} {part['bound']}".encode()
                )
        self.counts[f"partition: {action['how']}"] += 1

    # --- parts ---

    @contextmanager
    def pipeline(self) -> Iterator[Pipeline]:
        with Pipeline.open(self.config) as pipeline:
            yield pipeline

    @contextmanager
    def _admin(self) -> Iterator[psycopg.Connection[Any]]:
        with psycopg.connect(self.servers.dsn, autocommit=True) as admin:
            yield admin

    def _log(self, what: str) -> str:
        return str(self.config_file.with_name(f"{what}.log"))
