"""What ``init`` says before it has asked anybody."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from cdc_assets.cli.main import cli


@pytest.mark.parametrize("name", ["app-1", "1app", "App", "é"])
def test_a_name_that_no_source_has_is_refused_first(name: str) -> None:
    done = CliRunner().invoke(cli, ["init", name, "--yes"], env={"APP_1_DSN": None})
    assert done.exit_code == 2
    assert "name: write up to 40 lower-case letters, digits and underscores" in done.output
    assert "export" not in done.output


def test_the_address_is_asked_for_by_a_name_that_a_shell_takes() -> None:
    done = CliRunner().invoke(cli, ["init", "app_1", "--yes"], env={"APP_1_DSN": None})
    assert "the source's address is missing: export APP_1_DSN, or give --address." in done.output
