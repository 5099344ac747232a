"""What ``check`` says to a person, and what it leaves to scripts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cdc_assets.cli.main import cli
from cdc_assets.messages.findings import Finding, Severity
from cdc_assets.readiness import surroundings

Checked = Callable[..., Result]


def finding(severity: Severity, code: str, remedy: str = "") -> Finding:
    return Finding(code, severity, f"{code} is so.", remedy)


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checked:
    path = tmp_path / "app.yaml"
    path.write_text("{name: app, postgres: {dsn: postgresql://u@h/d}, tables: [t, u]}")

    def run(found: list[Finding], *options: str) -> Result:
        monkeypatch.setattr(surroundings, "review", lambda _config: found)
        monkeypatch.setattr("cdc_assets.cli.group.discovered", lambda config: config)
        return CliRunner().invoke(cli, ["--config", str(path), "check", *options])

    return run


def test_its_report_is_its_result_and_ends_with_what_is_wrong_and_a_verdict(
    checked: Checked,
) -> None:
    found = [
        finding("error", "wal_level", "alter system set wal_level = logical;"),
        finding("info", "server_version"),
        finding("warning", "standby"),
        finding("error", "role"),
    ]
    result = checked(found)
    assert result.stdout.splitlines() == [
        "info server_version: server_version is so.",
        "warning standby: standby is so.",
        "error wal_level: wal_level is so.",
        "    alter system set wal_level = logical;",
        "error role: role is so.",
        "not ready: 2 errors, 1 warning",
    ]
    assert (result.stderr, result.exit_code) == ("", 1)


def test_a_source_that_is_ready_is_said_to_be(checked: Checked) -> None:
    result = checked([finding("info", "server_version")])
    assert result.stdout.splitlines()[-1] == "ready: 2 tables"
    assert result.exit_code == 0
    result = checked([finding("warning", "standby")])
    assert result.stdout.splitlines()[-1] == "ready: 2 tables, 1 warning"
    assert result.exit_code == 0


def test_scripts_get_the_findings_alone(checked: Checked) -> None:
    found = [finding("error", "wal_level"), finding("info", "server_version")]
    result = checked(found, "--json")
    assert json.loads(result.stdout) == [one.to_json() for one in found]
    assert result.exit_code == 1
