"""The flusher's port: what it tells while databases are away, and to whom."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.errors import ConfigurationError
from cdc_assets.flusher.progress import Progress
from cdc_assets.flusher.report import looks, probes, reporter
from cdc_assets.log.store import LogStore
from cdc_assets.observe.figures import look
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.support.flusher import Bench, bench, flushing
from cdc_assets_tests.support.metrics import free_port, got, scraped, verdict
from cdc_assets_tests.support.waiting import wait_for


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(reporter, "PROBE_SECONDS", 0.1)


@pytest.fixture
def apart(postgres: EmbeddedPostgres, postgres_dsn: NewDatabase, tmp_path: Path) -> Iterator[Bench]:
    """A source whose log is in another database."""
    with bench(postgres.start(), "apart", tmp_path, postgres_dsn()) as made:
        yield made


def configured(source: Bench, *tables: str, **metrics: object) -> SourceConfig:
    settings = source.settings(*tables, flush_interval="50ms")
    return parse_config(settings | {"metrics": metrics}, "test")


@contextmanager
def streaming(config: SourceConfig) -> Iterator[Progress]:
    assert config.metrics.port is not None
    with flushing(config) as progress:
        wait_for(lambda: is_ready(config.metrics.port))
        yield progress


def is_ready(port: int | None) -> bool:
    try:
        return port is not None and verdict(port, "/ready") == (200, {"status": "ok"})
    except OSError:
        return False


def test_a_database_that_is_away_leaves_out_its_figures_and_fails_no_scrape(
    apart: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "UNHEARD_SECONDS", 1.0)
    apart.execute("create table t (id int primary key)")
    port = free_port()
    assert apart.log_dsn is not None
    with streaming(configured(apart, "public.t", port=port)):
        wait_for(lambda: scraped(port, apart.name)["coordination_up",] == 1)
        assert ("tables", "streaming") in scraped(port, apart.name)
        with psycopg.connect(apart.dsn, autocommit=True) as admin:
            log = psycopg.conninfo.conninfo_to_dict(apart.log_dsn)["dbname"]
            admin.execute(f"alter database {log} allow_connections false".encode())
            admin.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where datname = %s", (log,)
            )
            found = scraped(port, apart.name)
            assert found.pop(("coordination_up",)) == 0
            assert {key[0].partition("_")[0] for key in found} == {"flusher"}
            wait_for(lambda: verdict(port, "/ready")[0] == 503)
            status, said = verdict(port, "/ready")
            assert status == 503
            assert said["status"] in ("log", "reconnecting")
            assert verdict(port, "/live") == (200, {"status": "ok"})
            admin.execute(f"alter database {log} allow_connections true".encode())
        wait_for(lambda: is_ready(port), seconds=60)
        wait_for(lambda: scraped(port, apart.name)["coordination_up",] == 1)


def test_a_database_that_hangs_holds_up_neither_scrapes_nor_the_stream(source: Bench) -> None:
    source.execute("create table t (id int primary key)")
    port = free_port()
    with streaming(configured(source, "public.t", port=port)) as progress:
        wait_for(lambda: scraped(port, source.name)["coordination_up",] == 1)
        with source.locking("_pg2iceberg.work_done", "access exclusive"):
            began = time.monotonic()
            assert scraped(port, source.name)["coordination_up",] == 0
            assert time.monotonic() - began < looks.PATIENCE_SECONDS + 2
            # The look is still under way: who comes now doesn't wait for it again.
            began = time.monotonic()
            assert scraped(port, source.name)["coordination_up",] == 0
            assert time.monotonic() - began < 1
            rows = progress.rows
            source.execute("insert into t select generate_series(1, 10)")
            wait_for(lambda: progress.rows == rows + 10)
            assert is_ready(port)
        wait_for(lambda: scraped(port, source.name)["coordination_up",] == 1)


def test_several_scrapers_cost_one_look(source: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "LOOK_SECONDS", 60.0)
    source.execute("create table t (id int primary key)")
    port, asked = free_port(), list[LogStore]()

    def counted(store: LogStore) -> look.Figures:
        asked.append(store)
        return look.look(store)

    monkeypatch.setattr(looks, "look", counted)
    with streaming(configured(source, "public.t", port=port)):
        assert not asked  # nobody scraped: probes ask no database
        for _ in range(3):
            assert scraped(port, source.name)["coordination_up",] == 1
    assert len(asked) == 1


def series(source: Bench, tables: list[str], *, each: bool) -> set[tuple[str, ...]]:
    """Those of these tables, each of which has had a change."""
    port = free_port()
    with streaming(configured(source, *tables, port=port, tables=each)) as progress:
        wait_for(lambda: scraped(port, source.name)["tables", "streaming"] == len(tables))
        for name in tables:
            source.execute(f"insert into {name} select coalesce(max(id), 0) + 1 from {name}")
        wait_for(lambda: progress.rows >= len(tables))
        wait_for(lambda: ("lag_seconds",) in scraped(port, source.name))
        return set(scraped(port, source.name))


def test_series_do_not_grow_with_the_tables_unless_told_to(source: Bench) -> None:
    names = [f"public.t{number}" for number in range(30)]
    for name in names:
        source.execute(f"create table {name} (id int primary key)")
    few, many = series(source, names[:1], each=False), series(source, names, each=False)
    assert few == many
    assert len(many) < 100
    by_table = series(source, names, each=True) - many
    assert len(by_table) >= 6 * len(names)
    assert {name for name in names for key in by_table if name in key} == set(names)


def test_whoever_has_no_token_gets_status_words_alone(source: Bench) -> None:
    source.execute("create table t (id int primary key)")
    port = free_port()
    config = configured(source, "public.t", port=port, tables=True, token="s3cret")
    with streaming(config):
        assert got(port, "/metrics") == got(port, "/metrics", "wrong") == (401, "")
        assert got(port, "/metrics", "s3crét")[0] == 401
        assert scraped(port, source.name, "s3cret")["coordination_up",] == 1
        for path in ("/", "/metrics/", "/any", "/live/x"):
            assert got(port, path) == (404, "")
        assert got(port, "/live") == (200, '{"status": "ok"}')
        assert got(port, "/ready") == (200, '{"status": "ok"}')
    with pytest.raises(ConfigurationError, match="token"):
        configured(source, "public.t", port=port, token="two words")


def test_who_waits_for_its_turn_is_alive_and_not_ready(source: Bench) -> None:
    source.execute("create table t (id int primary key)")
    port = free_port()
    active = configured(source, "public.t", port=free_port())
    waiting = configured(source, "public.t", port=port)
    with streaming(active), flushing(waiting) as standby:
        wait_for(lambda: standby.state == "waiting")
        assert verdict(port, "/live") == (200, {"status": "ok"})
        told = {"status": "waiting", "reason": "another flusher streams"}
        assert verdict(port, "/ready") == (503, told)


def test_who_has_lost_its_turn_tells_nothing_old_of_the_source(
    source: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdc_assets.flusher.flusher.LOCK_SECONDS", 0.05)
    source.execute("create table t (id int primary key)")
    port = free_port()
    other = source.config("public.t", flush_interval="50ms")
    with streaming(configured(source, "public.t", port=port)) as first, flushing(other) as second:
        wait_for(lambda: second.state == "waiting")
        wait_for(lambda: scraped(port, source.name)["flusher_retained_wal_bytes",] > 0)

        def has_lost() -> bool:
            if (first.state, second.state) == ("streaming", "waiting"):
                source.terminate("flusher")
            return first.waits

        wait_for(has_lost)
        wait_for(lambda: not scraped(port, source.name)["flusher_retained_wal_bytes",])
        found = scraped(port, source.name)
        assert found["flusher_lag_seconds",] == found["flusher_lag_bytes",] == 0
        assert found["flusher_wal_status", "reserved"] == 0


def test_who_only_holds_pins_tells_nothing_of_a_stream(source: Bench) -> None:
    source.execute("create table t (id int primary key)")
    port = free_port()
    settings = source.settings("public.t") | {"metrics": {"port": port}}
    config = parse_config(settings | {"snapshot": {"mode": "snapshot_only"}}, "test")
    with flushing(config):
        wait_for(lambda: is_ready(port))
        wait_for(lambda: scraped(port, source.name)["coordination_up",] == 1)
        assert not [key for key in scraped(port, source.name) if key[0].startswith("flusher")]


def test_a_loop_that_stands_still_is_not_alive() -> None:
    progress = Progress()
    source = {"name": "s", "postgres": {"dsn": "postgresql://h/d"}, "tables": [{"name": "t"}]}
    config = parse_config(source, "test")
    assert probes.live(progress, 1000.0).is_well  # nothing goes round yet
    assert probes.ready(config, progress, None, 0.0).status == "starting"
    progress.state, progress.beat = "streaming", 1000.0
    assert probes.live(progress, 1000.0 + probes.STALLED_SECONDS).is_well
    assert probes.ready(config, progress, 1001.0, 1002.0).is_well
    later = 1001.0 + probes.STALLED_SECONDS
    stalled = probes.live(progress, later)
    assert (stalled.status, stalled.is_well) == ("stalled", False)
    assert probes.ready(config, progress, later, later) == stalled
    progress.beat = later
    assert probes.ready(config, progress, 1001.0, later).status == "log"


def test_the_loop_beats_while_nothing_happens(source: Bench) -> None:
    source.execute("create table t (id int primary key)")
    with streaming(configured(source, "public.t", port=free_port())) as progress:
        before = progress.beat
        assert before is not None
        wait_for(lambda: (progress.beat or 0.0) > before + 1.0)
    assert progress.beat is None
