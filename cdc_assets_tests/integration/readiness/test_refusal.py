"""A flusher or a materializer that can't work doesn't begin: it names all that is wrong at once."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from pyspark.sql import SparkSession

from cdc_assets.config.source import SourceConfig
from cdc_assets.dagster.build import build_defs
from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.errors import NotReady, SourceMismatch
from cdc_assets.flusher.flusher import run
from cdc_assets.messages.findings import Finding
from cdc_assets.pipeline import Pipeline
from cdc_assets.readiness.source.server import preflight
from cdc_assets.readiness.surroundings import admitted
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.integration.readiness.test_check import config_of
from cdc_assets_tests.support.flusher import Bench, bench, flushing, start_flusher
from cdc_assets_tests.support.waiting import wait_for


@pytest.fixture
def source(source: Bench) -> Bench:
    source.execute("create table t (id int primary key)")
    return source


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_everything_that_the_flusher_lacks_is_named_together(
    public_directory: Path, tmp_path: Path
) -> None:
    (tmp_path / "staging").write_text("a file where a folder has to be")
    settings = {"wal_level": "replica", "max_wal_senders": "0", "fsync": "off"}
    with (
        EmbeddedPostgres(public_directory / "refusing", settings=settings) as server,
        bench(server.dsn() or "", "lacking", tmp_path) as source,
    ):
        process = start_flusher(source.config_file("public.t"))
        assert process.wait(60) == 1  # and its supervisor backs off
        said = (tmp_path / "flusher.log").read_text().splitlines()[-1]
        for code in ("wal_level", "senders_exhausted", "staging_unwritable"):
            assert f"{code}: " in said
        assert "alter system set wal_level = logical" in said
        assert "staging.uri" in said
        assert source.execute("select to_regnamespace('_pg2iceberg')") == [(None,)]


def test_a_log_whose_files_are_elsewhere_is_not_gone_on_with(
    source: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a start in another folder, whose home is another one."""
    config = source.config("public.t")
    source.flush(config)
    source.execute("insert into t values (1)")
    source.flush(config)
    source.execute("insert into t values (2)")
    there, moved = config.staging_uri, (tmp_path / "elsewhere").as_uri()

    def other(**staging: object) -> SourceConfig:
        given = {**json.loads(config.dump()), "staging": {"uri": moved, **staging}}
        return SourceConfig.model_validate(given, context={"expanded": True})

    with pytest.raises(NotReady) as refused:
        source.flush(other())
    assert refused.value.codes == ("staging_elsewhere",)
    assert f"staging: {{former_uris: [{json.dumps(there)}]}}" in str(refused.value)
    assert not list((tmp_path / "elsewhere").rglob("*.parquet"))
    for _ in range(2):  # with a file there, too
        source.flush(other(former_uris=[there]))
    assert list((tmp_path / "elsewhere").rglob("*.parquet"))


def test_what_the_log_remembers_is_named_beside_it(source: Bench, tmp_path: Path) -> None:
    config = source.config("public.t")
    source.flush(config)
    source.drop_slot()
    with pytest.raises(SourceMismatch) as caught:  # alone: who may begin anew decides
        source.flush(config)
    assert caught.value.codes == ("slot_gone",)
    poor = make_conninfo(source.dsn, user="poor", password="p")
    source.execute(
        "create role poor login password 'p'; grant usage on schema _pg2iceberg to poor;"
        " grant select, insert, update, delete on all tables in schema _pg2iceberg to poor"
    )
    try:
        source.dsn = poor
        with pytest.raises(NotReady) as refused:
            source.flush(source.config("public.t"))
        assert refused.value.codes == ("replication_privilege", "slot_gone")
    finally:
        source.execute("drop owned by poor; drop role poor")


def test_a_table_that_cannot_be_followed_does_not_stop_the_others(source: Bench) -> None:
    source.execute("create table n (v text); create table s (v text); insert into n values ('x')")
    source.execute("update n set v = 'y'")
    source.execute("select pg_stat_force_next_flush()")
    config = source.config("public.t", "public.n", "public.gone")
    source.flush(config)
    source.execute("insert into t values (1)")
    source.flush(config)
    assert source.ids() == ["1"]
    assert "public.gone" in source.parked()


def test_a_table_that_was_parked_before_its_first_copy_is_told(source: Bench) -> None:
    """Mended, it has no other finding; nothing of it is copied until it is taken up."""
    source.execute("alter table t drop constraint t_pkey")
    config = source.config("t")

    def told() -> dict[str, Finding]:
        with Pipeline.open(config) as pipeline:
            found = preflight(source.connection, config, pipeline.store, source.dsn)
        return {finding.code: finding for finding in found}

    source.flush(config)
    assert "no primary key" in told()["table_parked"].message
    source.execute("alter table t add primary key (id)")
    remedy = told()["table_parked"].remedy
    assert "the flusher takes it up within a minute" in remedy
    source.flush(config)
    assert source.parked() == {}
    assert "table_parked" not in told()


def test_a_table_that_could_not_be_registered_is_taken_up_once_it_can_be(
    source: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the flusher that runs: nobody has to ask for it."""
    monkeypatch.setattr("cdc_assets.pins.pins._REFUSED_SECONDS", 0.5)
    config = source.config("public.t", "public.gone")
    source.flush(config)
    assert "public.gone" in source.parked()
    with flushing(config):
        source.execute("create table gone (id int primary key)")
        wait_for(lambda: source.parked() == {})
        source.execute("insert into gone values (1)")
        states = "select state from _pg2iceberg.tables where table_name = 'public.gone'"
        wait_for(lambda: source.ask_log(states) == [("streaming",)])


def test_a_publication_is_not_said_to_get_a_table_that_is_not_there(source: Bench) -> None:
    source.flush(source.config("public.t"))
    source.execute("create table u (id int primary key)")
    config = source.config("public.t", "public.u", "public.gone")
    with Pipeline.open(config) as pipeline:
        found = preflight(source.connection, config, pipeline.store, source.dsn)
    told = {finding.code: finding.message for finding in found}
    assert "lacks public.u; will be added" in told["publication"]
    assert "public.gone" in told["table_missing"]


def test_a_database_that_is_down_is_an_outage_and_no_refusal(
    source: Bench, closed_port: int
) -> None:
    source.dsn = make_conninfo(source.dsn, port=closed_port)
    with pytest.raises(psycopg.OperationalError):
        run(source.config("public.t"))


def test_the_member_of_rds_replication_may_stream(source: Bench) -> None:
    """RDS and Aurora let that role replicate, whose attributes don't say so."""
    source.execute("create role rds_replication; create role app login password 'p'")
    try:
        with psycopg.connect(make_conninfo(source.dsn, user="app", password="p")) as app:
            config = source.config("public.t")
            assert "replication_privilege" in {f.code for f in preflight(app, config)}
            source.execute("grant rds_replication to app")
            assert "replication_privilege" not in {f.code for f in preflight(app, config)}
    finally:
        source.execute("drop role app; drop role rds_replication")


def test_everything_that_a_merge_lacks_is_named_together(
    postgres_dsn: NewDatabase, tmp_home: Path, closed_port: int
) -> None:
    dsn = postgres_dsn()
    config = config_of(
        dsn,
        staging={"uri": "s3://no-such-bucket/staging"},
        lake={"catalog": {"type": "sql", "uri": make_conninfo(dsn, port=closed_port)}},
        s3={"endpoint": f"http://127.0.0.1:{closed_port}", "region": "us-east-1"},
        spark={"remote": f"sc://127.0.0.1:{closed_port}"},
    )

    def never() -> SparkSession:
        raise AssertionError("nothing answers there")

    expected = {"staging_unreadable", "catalog_unreachable", "spark_unreachable"}
    with pytest.raises(NotReady) as caught:
        admitted(config, never)
    assert set(caught.value.codes) == expected
    # A run in Dagster fails with all of it, and the sensor backs off.
    job = build_defs(config).resolve_job_def("materialize_src_tables")
    result = job.execute_in_process(raise_on_error=False)
    assert not result.success
    failed = next(event for event in result.all_events if event.is_step_failure)
    error = failed.step_failure_data.error
    assert error is not None
    cause = error.cause or error
    assert all(code in cause.message for code in expected)
