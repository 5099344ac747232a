"""The flusher's port, and what those who connect to it may cost the process."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from cdc_assets.config.alerts import MetricsConfig
from cdc_assets.flusher.report import probes, server
from cdc_assets.flusher.report.server import MetricsServer
from cdc_assets_tests.support.metrics import free_port, got


def unsaid(_thread: str, _trouble: str | None) -> None:
    """Where nobody reads what is noted."""


@pytest.fixture
def port() -> Iterator[int]:
    config = MetricsConfig(port=free_port())
    serving = MetricsServer(config, [], {"/live": lambda: probes.OK}, unsaid)
    serving.ensure()
    assert config.port is not None
    yield config.port
    serving.close()


def test_those_who_connect_and_say_nothing_cost_few_threads_and_keep_no_probe_waiting(
    port: int,
) -> None:
    before = threading.active_count()
    with ExitStack() as stack:
        for _ in range(5 * server._MOST_CONNECTIONS):
            silent = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            silent.sendall(b"G")
            assert got(port, "/live")[0] == 200
        assert threading.active_count() - before <= server._MOST_CONNECTIONS


def test_a_form_that_is_unknown_is_answered_in_the_plain_one(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    for accept in ("application/openmetrics-text; version=x", "text/plain;version=x", "é;;,"):
        assert got(port, "/metrics", accept=accept) == (200, "")
    assert not caplog.text


def test_an_address_that_is_none_is_said_in_words(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    MetricsServer(MetricsConfig(port=free_port(), host="nosuch.invalid"), [], {}, unsaid).ensure()
    assert "nosuch.invalid" in caplog.text
    assert "Unknown error" not in caplog.text
