"""Prometheus's rules and Grafana's dashboard name what a flusher that runs has, and all of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.core import Metric
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from cdc_assets.config.source import parse_config
from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets_tests.support.flusher import Bench, bench, flushing
from cdc_assets_tests.support.metrics import free_port, got
from cdc_assets_tests.support.waiting import wait_for

ROOT = Path(__file__).parents[2]
RULES = ROOT / "infra" / "prometheus" / "rules.yaml"
DASHBOARD = ROOT / "infra" / "grafana" / "dashboard.json"
DOCUMENTED = ROOT / "docs" / "operate" / "metrics.md"
NAME = re.compile(r"\bcdc_assets_\w+")
# Also the name of the label that a state is told by.
SELECTED = re.compile(r'(\w+)\s*(?:=~|!=|!~|=)\s*"([^"]*)"')

Samples = dict[str, list[dict[str, str]]]
"""The labels of each sample, by name."""


def rules() -> list[dict[str, Any]]:
    found = yaml.safe_load(RULES.read_text())
    return [rule for group in found["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    found = json.loads(DASHBOARD.read_text())
    return [panel for panel in found["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[str]:
    for rule in rules():
        yield rule["expr"]
    for panel in panels():
        yield from (target["expr"] for target in panel["targets"])


@pytest.fixture(scope="module")
def samples(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Samples:
    """Of a source that streams one table, and has one to copy."""
    with bench(postgres.start(), "metrics", tmp_path_factory.mktemp("metrics")) as source:
        return _samples(source)


def _samples(source: Bench) -> Samples:
    source.execute("create table streams (id int primary key)")
    source.execute("create table copies (id int primary key); insert into copies values (1)")
    port = free_port()
    source.flush(source.config("public.streams"))  # it isn't copied
    config = parse_config(
        source.settings("public.streams", "public.copies", flush_interval="50ms")
        | {"metrics": {"port": port, "tables": True}, "snapshot": {}},
        "test",
    )
    with flushing(config) as progress:
        wait_for(lambda: progress.state == "streaming" and "copying" in _states(source))
        source.execute("insert into streams values (1)")
        wait_for(lambda: progress.rows == 1)
        source.execute(
            'insert into _pg2iceberg.mat_cursor (consumer_group, source, table_name, "offset",'
            " applied_lsn) values ('search', %s, 'public.streams', 0, '0/0')",
            source.name,
        )
        wait_for(lambda: "cdc_assets_group_held_bytes{" in got(port, "/metrics")[1])
        wait_for(lambda: "cdc_assets_pin_wal_bytes{" in got(port, "/metrics")[1])
        text = got(port, "/metrics")[1]
        # What Prometheus asks for; its form is stricter.
        strict = got(port, "/metrics", accept="application/openmetrics-text; version=1.0.0")[1]
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(dict(sample.labels))
    strictly: Callable[[str], Iterable[Metric]] = openmetrics.text_string_to_metric_families
    names = {sample.name for family in strictly(strict) for sample in family.samples}
    assert names == found.keys()
    return found


def _states(source: Bench) -> set[str]:
    return {str(state) for (state,) in source.ask_log("select state from _pg2iceberg.tables")}


def test_what_they_name_is_there(samples: Samples) -> None:
    labels = {label for each in samples.values() for one in each for label in one}
    for expression in expressions():
        named = set(NAME.findall(expression))
        assert named <= {*samples, *labels}, expression
        for label, value in SELECTED.findall(expression):
            if label in ("job", "source"):
                continue
            assert any(
                re.fullmatch(value, one.get(label, "")) for name in named for one in samples[name]
            ), expression
        for by in re.findall(r"by \(([^)]*)\)", expression):
            assert set(by.split(", ")) <= labels, expression


def test_nothing_that_is_told_is_left_out(samples: Samples) -> None:
    used = {name for expression in expressions() for name in NAME.findall(expression)}
    assert {name for name in samples if name.startswith("cdc_assets_")} - used == set()
    page = DOCUMENTED.read_text()
    names = {re.sub(r"_(bucket|sum|count)$", "", name) for name in samples}
    assert {name for name in names if f"`{name.removeprefix('cdc_assets_')}" not in page} == set()


def test_each_alert_says_what_and_where() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names))
    page = DOCUMENTED.read_text()
    for rule in rules():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert "$labels." in rule["annotations"]["summary"]
        assert rule["annotations"]["description"]
        assert f"`{rule['alert']}`" in page


def test_the_dashboard_is_whole() -> None:
    board = json.loads(DASHBOARD.read_text())
    identities = [panel["id"] for panel in board["panels"]]
    assert len(identities) == len(set(identities))
    for panel in panels():
        assert panel["datasource"]["uid"] == "${datasource}"
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        assert all('source=~"$source"' in target["expr"] for target in panel["targets"])


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_reads_them(tmp_path: Path) -> None:
    subprocess.run(["promtool", "check", "rules", str(RULES)], check=True)
    boards = [{"record": "a", "expr": e.replace("$__rate_interval", "5m")} for e in expressions()]
    file = tmp_path / "dashboard.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": boards}]}))
    subprocess.run(["promtool", "check", "rules", str(file)], check=True)


UP = 'up{job="cdc_assets",instance="a"}'
STATE = 'cdc_assets_flusher_state{cdc_assets_flusher_state="streaming",source="s"}'
WAITING = 'cdc_assets_tables{state="waiting",source="s"}'
HERE, GONE, DOWN = "1x240", "1x40 _x200", "1x40 0x200"
"""For an hour, four times a minute; the last two from its tenth minute on."""


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize(
    ("series", "firing"),
    [
        ({UP: HERE, STATE: HERE}, set()),
        ({UP: HERE, STATE: DOWN}, {"CdcFlusherDown"}),
        ({UP: DOWN, STATE: GONE}, {"CdcFlusherNotScraped", "CdcFlusherDown"}),
        ({UP: GONE, STATE: GONE}, {"CdcFlusherNotScraped", "CdcFlusherDown"}),
        # Its pod is gone; those of other sources are there.
        ({UP: HERE, STATE: GONE}, {"CdcFlusherDown"}),
        # One of two.
        ({UP: HERE, UP.replace('"a"', '"b"'): GONE, STATE: HERE}, set()),
        # It only copies.
        ({UP: HERE}, set()),
        ({UP: HERE, WAITING: HERE}, {"CdcTablesWaiting"}),
        ({UP: HERE, WAITING: DOWN}, set()),
    ],
)
def test_alerts_fire_when_nothing_streams_or_begins(
    series: dict[str, str], firing: set[str], tmp_path: Path
) -> None:
    said = "count by (alertname) (ALERTS{alertstate='firing'})"
    expected = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(firing)]
    case = {
        "interval": "15s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [{"expr": said, "eval_time": "50m", "exp_samples": expected}],
    }
    file = tmp_path / "case.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "tests": [case]}))
    subprocess.run(["promtool", "test", "rules", str(file)], check=True)
