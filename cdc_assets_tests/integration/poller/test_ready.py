"""What query mode demands of a source, and what it doesn't; and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner, Result
from psycopg.conninfo import make_conninfo

from cdc_assets.cli.main import cli
from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.errors import SourceMismatch
from cdc_assets.log.backfills import request_deletes
from cdc_assets.readiness.flushing import source_findings
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.support.queried import BY_CLOCK, CLOCKED, T, queried


def test_a_reader_of_a_server_without_logical_decoding_is_enough(tmp_home: Path) -> None:
    server = EmbeddedPostgres(tmp_home / "plain", settings={"wal_level": "replica", "fsync": "off"})
    try:
        admin = server.start()
        with psycopg.connect(admin, autocommit=True) as connection:
            connection.execute("create role reader login password 'secret'")
            connection.execute(b"alter default privileges grant select on tables to reader")
            connection.execute("create database log owner reader")
        dsn = make_conninfo(admin, user="reader", password="secret")
        state = {"postgres_url": make_conninfo(dsn, dbname="log")}
        with (
            psycopg.connect(admin, autocommit=True) as connection,
            queried(
                dsn, "select 1", BY_CLOCK, state=state, created=(connection, CLOCKED)
            ) as source,
        ):
            errors = [f for f in source_findings(source.config) if f.severity == "error"]
            assert not errors
            connection.execute("insert into t values (1, 'x')")
            source.flush()
            assert source.found().keys() == {"1"}
            assert not connection.execute("select 1 from pg_replication_slots").fetchall()
    finally:
        server.remove()


@pytest.mark.parametrize(
    ("table", "code", "severity"),
    [
        ("create table t (id int, updated_at timestamptz not null)", "watermark", "error"),
        ("create table t (id int primary key, updated_at timestamptz)", "watermark", "error"),
        ("create table t (id int primary key, v text)", "watermark", "error"),
        ("create table t (id int primary key, updated_at int not null)", "watermark", "error"),
        (
            "create table t (id int primary key, updated_at timestamptz not null)",
            "watermark_unindexed",
            "warning",
        ),
        (
            "create table t (id int primary key, updated_at timestamp not null)",
            "watermark_without_zone",
            "warning",
        ),
        (f"{CLOCKED}; create view w as select * from t", None, None),
    ],
)
def test_check_says_what_a_table_lacks(
    postgres_dsn: NewDatabase, tmp_home: object, table: str, code: str | None, severity: str | None
) -> None:
    with queried(postgres_dsn(), table, BY_CLOCK, pinned=False) as source:
        found = {f.code: f for f in source_findings(source.config) if f.table == "public.t"}
        if code is None:
            assert not {c for c in found if c.startswith("watermark")}
            return
        assert found[code].severity == severity
        assert found[code].remedy


def test_a_source_that_was_decoded_is_copied_anew_and_back(
    postgres_dsn: NewDatabase, tmp_home: object
) -> None:
    """What changed between is in neither's log."""
    dsn = postgres_dsn()
    with queried(dsn, CLOCKED, {"name": "t"}, query=None) as source:
        [row] = source.pipeline.store.tables()
        assert (row.epoch, row.state) == (1, "streaming")
        source.execute("select pg_drop_replication_slot('cdc_src'); drop publication cdc_src")
    with queried(dsn, "select 1", BY_CLOCK) as source:
        [row] = source.pipeline.store.tables()
        assert row.epoch == 2
        source.execute("insert into t values (1, 'x')")
        source.flush()
        assert source.is_level()
    with (
        queried(dsn, "select 1", {"name": "t"}, query=None, pinned=False) as source,
        pytest.raises(SourceMismatch, match="slot cdc_src is gone"),
    ):
        source.pins.prepare()


def ran(config: Path, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["--config", str(config), *arguments])


def test_commands_that_need_one_lsn_are_refused(
    postgres_dsn: NewDatabase, tmp_home: object, tmp_path: Path
) -> None:
    with queried(postgres_dsn(), CLOCKED, BY_CLOCK) as source:
        file = tmp_path / "source.json"
        file.write_text(source.config.dump())
        for command in (["verify"], ["mark", "now"], ["pin", "--hold"]):
            refused = ran(file, *command)
            assert refused.exit_code == 2, refused.output
            assert "in query mode there is none" in refused.output
        source.execute("insert into t values (1, 'x')")
        assert ran(file, "flush", "--until", "current").exit_code == 0
        told = ran(file, "status", "--json")
        assert told.exit_code == 0, told.output
        status: dict[str, Any] = json.loads(told.stdout)
        [table] = status["tables"]
        assert table["state"] == "streaming"
        assert table["pending_rows"] == 1
        assert table["info"] == [
            "rows that were deleted at the source since the copy are still here"
        ]
        source.pins.close()
        dropped = ran(file, "drop-source", "--yes", "src")
        assert dropped.exit_code == 0, dropped.output
        assert T in {row.table for row in source.pipeline.store.tables()}
        assert not source.execute("select 1 from _pg2iceberg.query_watermarks")


def test_deletes_are_asked_for_once_at_a_time(postgres_dsn: NewDatabase, tmp_home: object) -> None:
    with queried(postgres_dsn(), CLOCKED, BY_CLOCK) as source:
        assert request_deletes(source.pipeline.store, 0) == 1
        assert request_deletes(source.pipeline.store, 0) == 0
