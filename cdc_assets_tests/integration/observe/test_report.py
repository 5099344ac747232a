"""The health report: its samples, its pictures, its Markdown, and the same facts in a terminal."""

from __future__ import annotations

import base64
import re
import xml.etree.ElementTree as ET
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg
import psycopg
import pytest
from click.testing import CliRunner

from cdc_assets.cli.main import cli
from cdc_assets.config.source import parse_config
from cdc_assets.dagster.assets.health import health_asset
from cdc_assets.dagster.build import build_defs
from cdc_assets.dagster.sensors import sessions
from cdc_assets.dagster.sensors.observe import health as health_sensor
from cdc_assets.flusher.flusher import run as flush
from cdc_assets.observe.plot import line_chart, picture, thinned
from cdc_assets.observe.report import look
from cdc_assets.observe.samples import Sample, applied_per_second, history
from cdc_assets.pins.pins import Pins
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.slots import current_lsn
from cdc_assets_tests.conftest import NewDatabase

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def _points(*values: float | None) -> list[tuple[datetime, float | None]]:
    return [(NOON + timedelta(minutes=i), value) for i, value in enumerate(values)]


def _lines(svg: str) -> list[list[tuple[int, int]]]:
    root = ET.fromstring(svg)
    return [
        [(int(x), int(y)) for x, y in (p.split(",") for p in line.attrib["points"].split())]
        for line in root.iter("{http://www.w3.org/2000/svg}polyline")
    ]


def test_a_line_has_the_form_of_its_values_and_gaps_where_there_are_none() -> None:
    svg = line_chart("a < b", _points(0, 10, None, 5, None), lambda v: f"{v:.0f} s")
    first, second = _lines(svg)
    assert [x for x, _ in first] == sorted(x for x, _ in first)
    assert first[0][1] > first[1][1], "greater is higher"
    assert second[0] == second[1], "a single point is a dot"
    assert first[1][1] < second[0][1] < first[0][1]
    assert ">a &lt; b<" in svg
    assert ">10 s<" in svg
    assert ">12:04 UTC<" in svg


@pytest.mark.parametrize("points", [[], _points(None), _points(0), _points(0, 0)])
def test_what_has_no_form_is_drawn_all_the_same(
    points: list[tuple[datetime, float | None]],
) -> None:
    ET.fromstring(line_chart("t", points, str))


def test_a_day_of_samples_is_a_small_picture_without_losing_a_peak() -> None:
    day = _points(*(99.0 if i == 777 else 1.0 for i in range(1440)))
    assert len(thinned(day)) <= 120
    assert max(value or 0 for _, value in thinned(day)) == 99.0
    assert len(picture("lag", line_chart("t", day, str))) < 4000


def test_throughput_is_what_was_applied_between_two_samples() -> None:
    def sample(minute: int, applied: int) -> Sample:
        return Sample(NOON + timedelta(minutes=minute), 0.0, 0, 0, 0, 0, applied)

    found = applied_per_second([sample(0, 100), sample(1, 700), sample(3, 700), sample(4, 0)])
    assert [rate for _, rate in found] == [10.0, 0.0, 0.0]


def test_the_report_says_what_is_wrong_and_shows_the_last_day(
    tmp_home: Path,
    tmp_path: Path,
    postgres_dsn: NewDatabase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dsn = postgres_dsn()
    odd = 'public."a|b*c"'
    config = parse_config(
        {
            "name": "src",
            "postgres": {"dsn": dsn},
            "tables": [{"name": "public.t"}, {"name": odd}],
            "spark": {"remote": "sc://127.0.0.1:1"},
        },
        "test",
    )
    defs = build_defs(config)
    repository = defs.get_repository_def()
    monkeypatch.setattr(health_sensor, "_reported", {})
    with (
        psycopg.connect(dsn, autocommit=True) as client,
        Pipeline.open(config) as pipeline,
        dg.DagsterInstance.ephemeral() as instance,
    ):
        client.execute("create table t (id int primary key)")
        client.execute(f"create table {odd} (id int primary key)".encode())
        pins = Pins(pipeline)
        pins.prepare()
        pins.tick()
        flush(config, until=current_lsn(client))
        execute = pipeline.store.connection.execute
        execute(
            "insert into health_samples select 'src', clock_timestamp() - i * interval '1 minute',"
            " i % 60, i, i * 1000000, 0, 0, (2000 - i) * 600 from generate_series(2, 2000) i"
        )
        execute(
            "update tables set state = 'parked', reason = 'no <b>key</b>' where table_name ~ 'a'"
        )

        def tick() -> list[dg.AssetMaterialization]:
            with dg.build_sensor_context(instance, repository_def=repository) as context:
                found = repository.get_sensor_def("health_src").evaluate_tick(context)
            return [e for e in found.asset_events if isinstance(e, dg.AssetMaterialization)]

        try:
            [event] = tick()
            assert tick() == [], "nothing has changed"
            samples = history(pipeline.store)
            assert 1430 <= len(samples) <= 1441, "a day of them is kept"
            assert samples[-1].rows_applied == 0 < samples[-2].rows_applied, "one was taken"
            assert (NOON - samples[0].at).days < 1
            assert event.asset_key == dg.AssetKey(["health", "src"])
            assert event.metadata["grade"].value == "fail"
            report = str(event.metadata["report"].value)
            assert report.startswith('## src: FAIL\n\n- **FAIL** public."a\\|b\\*c" is parked')
            assert "no \\<b\\>key\\</b\\>" in report
            assert "cdc-assets --config FILE resync" in report
            pictures = re.findall(r"!\[([^]]+)\]\(data:image/svg\+xml;base64,([^)]+)\)", report)
            assert [name for name, _ in pictures] == ["lag", "throughput", "retained WAL"]
            for _, data in pictures:
                assert len(_lines(base64.b64decode(data).decode())[0]) > 100
            assert len(report) < 20_000

            # By hand it is the same asset. What is mended changes the grade: told at once.
            done = dg.materialize([health_asset(config)], instance=instance)
            assert done.success
            execute("update tables set state = 'waiting', reason = null")
            [event] = tick()
            assert event.metadata["grade"].value == "ok"
            assert look(pipeline).rows_per_second is not None

            file = tmp_path / "src.json"
            file.write_text(config.dump())
            arguments = ["--config", str(file), "status"]
            told = CliRunner().invoke(cli, arguments, env={"COLUMNS": "200"})
            assert told.exit_code == 0
            assert "slot cdc_src: reserved, keeps" in told.output
            assert "flusher: down" in told.output
        finally:
            pins.close()
            sessions.close_all()
