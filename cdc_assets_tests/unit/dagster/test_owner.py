"""Whose run is this: the command lines that decide whether it ends with its owner."""

from __future__ import annotations

import pytest

from cdc_assets.dagster.resources.owner import is_code_server, is_owner, owner


@pytest.mark.parametrize(
    "command",
    [
        "/x/.venv/bin/python -m dagster api grpc --lazy-load-user-code --socket /tmp/s",
        "/x/.venv/bin/python -m dagster code-server start --socket /tmp/s --heartbeat",
    ],
)
def test_a_code_server(command: str) -> None:
    assert is_code_server(command.split())
    assert not is_owner(command.split())


@pytest.mark.parametrize(
    ("command", "owns"),
    [
        ("/x/.venv/bin/python /x/.venv/bin/dagster dev -p 3000", True),
        ("/x/.venv/bin/python /x/.venv/bin/dg dev", True),
        ("/x/.venv/bin/python -m dagster._daemon run -m cdc_assets.definitions", True),
        ("/x/.venv/bin/dagster-daemon run", True),
        ("/bin/sh -c dagster-something", False),
        ("/sbin/docker-init -- dagster code-server start", False),
    ],
)
def test_an_owner(command: str, owns: bool) -> None:
    assert is_owner(command.split()) is owns


def test_this_process_belongs_to_no_code_server() -> None:
    assert owner() is None
