"""What a flusher tells of itself: in `status`, in the sensor's line, and to Prometheus."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import pytest
from click.testing import CliRunner

from cdc_assets.cli.main import cli
from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.dagster.sensors.flusher import sentence
from cdc_assets.flusher.progress import Probe
from cdc_assets.flusher.report import reporter as health
from cdc_assets.observe.status import collect
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.slots import current_lsn
from cdc_assets.process.children import Status
from cdc_assets_tests.support.flusher import Bench, flushing, reconnect
from cdc_assets_tests.support.metrics import free_port, scraped
from cdc_assets_tests.support.waiting import wait_for


def with_metrics(source: Bench, *tables: str, **metrics: object) -> SourceConfig:
    settings = source.settings(*tables, flush_interval="50ms") | {"metrics": metrics}
    return parse_config(settings, "test")


def told(config: SourceConfig) -> dict[str, Any]:
    """The flusher as ``status`` has it."""
    with Pipeline.open(config) as pipeline:
        return collect(pipeline).flusher.to_json()


def test_changes_and_positions_are_told_everywhere(
    source: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "PROBE_SECONDS", 0.1)
    source.execute("create table t (id int primary key, v int)")
    source.execute('create table "U" (id int primary key)')
    port = free_port()
    config = with_metrics(source, "public.t", 'public."U"', port=port, tables=True)
    source.flush(config)
    with flushing(config) as progress:
        wait_for(lambda: progress.state == "streaming")
        source.execute("insert into t select generate_series(1, 10)")
        source.execute("update t set v = 1 where id <= 3; delete from t where id = 4")
        source.execute('insert into "U" values (1); truncate "U"')
        end = current_lsn(source.connection)
        wait_for(lambda: progress.flushed >= end and progress.acknowledged >= end)
        # The end of the log is told once the source was asked after it.
        wait_for(lambda: Lsn.parse(told(config).get("staged_lsn", "0/0")) >= end)
        wait_for(lambda: told(config)["lag_seconds"] < 2)  # its own reports are WAL, too

        found = told(config)
        assert found["state"] == "streaming"
        assert found["changes"] == {
            "public.t": {"insert": 10, "update": 3, "delete": 1},
            'public."U"': {"insert": 1, "truncate": 1},
        }
        assert found["bytes"].keys() == found["changes"].keys()
        assert Lsn.parse(found["received_lsn"]) >= end
        assert Lsn.parse(found["acknowledged_lsn"]) >= end
        assert found["flushes"] >= 1
        assert 0 < found["flush_seconds_mean"] < 60
        assert found["wal_status"] == "reserved"

        metrics = scraped(port, source.name)
        assert metrics["flusher_changes_total", "insert", "public.t"] == 10
        assert metrics["flusher_changes_total", "truncate", 'public."U"'] == 1
        assert metrics["flusher_staged_bytes_total", "public.t"] == found["bytes"]["public.t"]
        assert metrics["flusher_state", "streaming"] == 1
        assert metrics["flusher_state", "reconnecting"] == 0
        assert metrics["flusher_staged_lsn",] >= int(end)
        assert metrics["flusher_lag_seconds",] < 60
        assert metrics["flusher_wal_status", "reserved"] == 1
        assert (
            metrics["flusher_flush_seconds_bucket", "+Inf"]
            == metrics["flusher_flush_seconds_count",]
        )
        assert metrics["flusher_flush_seconds_count",] >= found["flushes"]

        with Pipeline.open(config) as pipeline:
            line = sentence(Status(True, 4711, 0, 0, 0.0), collect(pipeline))
        for words in ("is streaming", "16 changes of 2 tables", "reconnects", "(reserved)"):
            assert words in line
        path = source.folder / "status.json"
        path.write_text(config.dump())
        shown = CliRunner().invoke(cli, ["--config", str(path), "status"]).stdout
        assert "flusher: streaming" in shown
        assert "public.t: 1 delete, 10 inserts, 3 updates" in shown
    assert told(config)["state"] == "down"


def test_no_port_no_endpoint_and_a_taken_one_stops_nobody(
    source: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(health, "PROBE_SECONDS", 0.1)
    source.execute("create table t (id int primary key)")
    assert with_metrics(source, "public.t").metrics.port is None
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = with_metrics(source, "public.t", port=port)
        source.flush(config)
        with flushing(config) as progress:
            wait_for(lambda: "metrics can't be served" in caplog.text)
            wait_for(lambda: "metrics port" in told(config).get("troubles", {}))
            source.execute("insert into t values (1)")
            wait_for(lambda: progress.rows == 1)
            taken.close()
            wait_for(lambda: _answers(source, port))
            wait_for(lambda: "metrics port" not in told(config)["troubles"])
            assert scraped(port, source.name)["flusher_changes_total", "insert"] == 1
    with pytest.raises(OSError, match="refused"):
        scraped(port, source.name)


def _answers(source: Bench, port: int) -> bool:
    try:
        return bool(scraped(port, source.name))
    except OSError:
        return False


def test_a_lost_stream_is_told_while_it_is_lost(
    source: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "PROBE_SECONDS", 0.1)
    source.execute("create table t (id int primary key)")
    config = source.config("public.t", flush_interval="50ms")
    source.flush(config)
    with flushing(config) as progress:
        for _ in range(3):
            reconnect(source, progress)
        wait_for(lambda: told(config).get("reconnects", 0) >= 3)
        assert "terminating connection" in told(config)["last_error"]


def test_who_ends_while_it_waits_says_nothing_of_the_stream(
    source: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A standby that is stopped isn't the flusher that streams."""
    monkeypatch.setattr(health, "PROBE_SECONDS", 0.1)
    tell, states = health.Health._tell, set[str]()

    def telling(told: health.Health) -> None:
        states.add(told._progress.state)
        tell(told)

    monkeypatch.setattr(health.Health, "_tell", telling)
    source.execute("create table t (id int primary key)")
    config = with_metrics(source, "public.t")
    with flushing(config) as active:
        wait_for(lambda: active.state == "streaming" and states)
        with flushing(config) as standby:
            wait_for(lambda: standby.state == "waiting")
            time.sleep(0.5)  # its thread has seen that
        assert standby.state == "stopped"
        assert states == {"streaming"}
    assert states == {"streaming", "stopped"}


def test_json_status_has_all_of_it(source: Bench) -> None:
    source.execute("create table t (id int primary key)")
    config = source.config("public.t")
    source.flush(config)
    path = source.folder / "status.json"
    path.write_text(config.dump())
    shown = CliRunner().invoke(cli, ["--config", str(path), "status", "--json"])
    found = json.loads(shown.stdout)
    assert found["flusher"]["state"] == "down"
    assert found["flusher"]["flushed_lsn"]
    assert found["slot"]["wal_status"] == "reserved"


def test_the_lag_in_seconds_is_the_age_of_what_is_not_flushed() -> None:
    probe = Probe()
    assert probe.lag_seconds(5.0, Lsn(0)) == 0
    probe.saw(10.0, Lsn(1000))
    probe.saw(12.0, Lsn(2000))
    assert probe.lag_seconds(13.0, Lsn(0)) == 3.0
    assert probe.lag_seconds(13.0, Lsn(1000)) == 1.0
    assert probe.lag_bytes(Lsn(500)) == 1500
    assert probe.lag_seconds(13.0, Lsn(2000)) == 0
    probe.saw(14.0, Lsn(2040))  # a page's header: no reader ever gets there
    assert probe.lag_seconds(20.0, Lsn(2000)) == 0
    assert probe.lag_bytes(Lsn(2000)) == 0
    for second in range(20, 20_000):  # behind for hours
        probe.saw(second, Lsn(second * 1000))
    assert probe.lag_seconds(20_000, Lsn(2000)) == 19_980
