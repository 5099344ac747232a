"""What flusher tests share: a database and a log of their own, a flusher to start and stop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import psutil
import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from cdc_assets.config.sections import S3Config
from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.flusher.flusher import FlushResult, run
from cdc_assets.flusher.progress import Progress
from cdc_assets.lake.catalog import catalog
from cdc_assets.log.staged.files import StagedRows
from cdc_assets.log.staged.storage import Storage
from cdc_assets.operations import copying, running
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.slots import current_lsn
from cdc_assets_tests.support.staged_rows import Row, parse_staged
from cdc_assets_tests.support.waiting import wait_for


@dataclass(slots=True)
class Bench:
    """One source with its log, staged below ``folder``; ``connection`` is a client's.

    ``log_dsn``: where the log is, if it isn't in the source.
    """

    name: str
    dsn: str
    folder: Path
    connection: psycopg.Connection[Any]
    log_dsn: str | None = None
    s3: dict[str, object] | None = None
    """Staging is on this object store (the configuration's ``s3``), in ``s3://bucket``."""

    def execute(self, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
        cursor = self.connection.execute(statement.encode(), parameters or None)
        return cursor.fetchall() if cursor.description else []

    def drop_slot(self) -> None:
        """Once nobody streams it any more: its server's process may end a moment after ours."""
        slot = f"cdc_{self.name}"
        busy = "select 1 from pg_replication_slots where slot_name = %s and active"
        wait_for(lambda: not self.execute(busy, slot))
        self.execute("select pg_drop_replication_slot(%s)", slot)

    def settings(self, *tables: str, **staging: object) -> dict[str, object]:
        place = "s3://bucket/staging" if self.s3 else (self.folder / "staging").as_uri()
        return {
            "name": self.name,
            "postgres": {"dsn": self.dsn},
            "tables": [{"name": table} for table in tables],
            "staging": {"uri": place, **staging},
            "snapshot": {"mode": "never"},
            "s3": self.s3 or {},
            "state": {"postgres_url": self.log_dsn},
        }

    def ask_log(self, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
        """Rows of the coordination database."""
        if self.log_dsn is None:
            return self.execute(statement, *parameters)
        with psycopg.connect(self.log_dsn, autocommit=True) as connection:
            return connection.execute(statement.encode(), parameters or None).fetchall()

    def parked(self) -> dict[str, str]:
        """The reason of each table that is parked."""
        rows = "select table_name, reason from _pg2iceberg.tables where state = 'parked'"
        return dict(self.ask_log(rows))

    def resync(self, config: SourceConfig, *tables: str) -> None:
        """What the command does, for those tables or all."""

        wanted = [config.table(name).id for name in tables] or [t.id for t in config.tables]
        with Pipeline.open(config) as pipeline, running.Spark(config) as spark:
            copying.resync(pipeline, spark, wanted, lambda _: None)

    def config(self, *tables: str, **staging: object) -> SourceConfig:
        return parse_config(self.settings(*tables, **staging), "test")

    def config_file(self, *tables: str, **staging: object) -> Path:
        path = self.folder / "source.json"
        path.write_text(json.dumps(self.settings(*tables, **staging)))
        return path

    def flush(self, config: SourceConfig) -> FlushResult:
        """Until everything that is committed now is in the log."""
        return run(config, until=current_lsn(self.connection))

    def flushed(self) -> Lsn:
        return Lsn.parse(self.ask_log("select lsn::text from _pg2iceberg.flushed_lsn")[0][0])

    def confirmed(self) -> Lsn:
        return Lsn.parse(
            self.execute(
                "select confirmed_flush_lsn::text from pg_replication_slots where slot_name = %s",
                f"cdc_{self.name}",
            )[0][0]
        )

    def uris(self, table: str) -> list[tuple[int, int, str]]:
        """``(start_offset, end_offset, URI)`` of each registered file."""
        return [
            (int(a), int(b), str(uri))
            for a, b, uri in self.ask_log(
                "select start_offset, end_offset, path from _pg2iceberg.log_index"
                " where table_name = %s order by start_offset",
                table,
            )
        ]

    def entries(self, table: str) -> list[tuple[int, int, Path]]:
        """``(start_offset, end_offset, file)`` of each registered file."""
        return [(a, b, Path(unquote(urlparse(uri).path))) for a, b, uri in self.uris(table)]

    def log(self, table: str) -> list[Row]:
        """All rows of the table's log; checks that the offsets have neither gap nor overlap."""
        rows, end = list[Row](), None
        storage = Storage.of(S3Config.model_validate(self.s3 or {}))
        for start, stop, uri, first in self.ask_log(
            "select start_offset, end_offset, path, first_row from _pg2iceberg.log_index"
            " where table_name = %s order by start_offset",
            table,
        ):
            assert start == (end if end is not None else start)
            staged = StagedRows(TableId.parse(table), uri, stop - start, 0, first).read(storage)
            found = parse_staged(0, staged.to_pylist())
            assert len(found) == stop - start
            rows.extend(found)
            end = stop
        return rows

    def ids(self, table: str = "public.t") -> list[str | None]:
        """Column ``id`` of the table's log."""
        return [row.data["id"] for row in self.log(table)]

    @contextmanager
    def locking(self, table: str, mode: str) -> Iterator[psycopg.Connection[Any]]:
        """Somebody has the lock for the length of the block, as a migration that is stuck does."""
        with psycopg.connect(self.dsn, application_name="stuck migration") as session:
            session.execute(f"lock table {table} in {mode} mode".encode())
            yield session

    def terminate(self, application: str) -> int:
        """End the sessions whose application_name ends so; how many there were."""
        return len(
            self.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where application_name like %s and datname = current_database()",
                f"cdc_assets {self.name} {application}",
            )
        )


def named_after(request: pytest.FixtureRequest) -> str:
    """A database's and source's name: short, because a session's name holds it twice."""
    letters = "".join(c if c.isalnum() else "_" for c in request.node.name.lower())
    return f"t_{letters.removeprefix('test_')[:16].strip('_')}"


@contextmanager
def bench(server_dsn: str, name: str, folder: Path, log_dsn: str | None = None) -> Iterator[Bench]:
    """A fresh database on the server; its slot and sessions are gone afterwards."""
    with psycopg.connect(server_dsn, autocommit=True) as admin:
        admin.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    dsn = make_conninfo(server_dsn, dbname=name)
    try:
        with psycopg.connect(dsn, autocommit=True) as connection:
            yield Bench(name, dsn, folder, connection, log_dsn)
    finally:
        with psycopg.connect(server_dsn, autocommit=True) as admin:
            _drop(admin, name)
        catalog._open.cache_clear()  # another test's database may have the name


def _drop(admin: psycopg.Connection[Any], name: str) -> None:
    admin.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity where datname = %s", (name,)
    )
    wait_for(
        lambda: (
            not admin.execute(
                "select from pg_replication_slots where database = %s and active", (name,)
            ).fetchall()
        )
    )
    admin.execute(
        "select pg_drop_replication_slot(slot_name) from pg_replication_slots where database = %s",
        (name,),
    )
    admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


@contextmanager
def flushing(config: SourceConfig) -> Iterator[Progress]:
    """A flusher in a thread of this process for the length of the block; its errors are raised."""
    stop, errors, progress = threading.Event(), list[Exception](), Progress()

    def work() -> None:
        try:
            run(config, stop=stop, progress=progress)
        except Exception as error:  # noqa: BLE001 - raised again by the test's own thread
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield progress
    finally:
        stop.set()
        thread.join(30)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def start_flusher(
    config_file: Path, *module: str, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """The supervised child, as its supervisor starts it; or another ``module`` with arguments."""
    with (config_file.parent / "flusher.log").open("ab") as log:
        return subprocess.Popen(
            [
                *(sys.executable, "-m"),
                *(module or ("cdc_assets.flusher.flusher",)),
                *("--config", str(config_file)),
            ],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={**os.environ, "CDC_ASSETS_LOG_LEVEL": "DEBUG", **(environment or {})},
        )


def reconnect(source: Bench, progress: Progress) -> None:
    """End the stream and wait for the next one.

    A walsender that is just starting, or ending, doesn't count: it is ended again if need be.
    """
    wait_for(lambda: progress.state == "streaming")
    before = progress.sessions

    def begun_anew() -> bool:
        if progress.sessions == before and progress.state == "streaming":
            source.terminate("flusher")
        return progress.sessions > before

    wait_for(begun_anew)


def ended(process: psutil.Process) -> bool:
    """Whether it is gone, or is a zombie whose parent hasn't looked yet."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
