"""`dagster dev` as a person starts it, asked through GraphQL."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from cdc_assets.embedded.postgres import EmbeddedPostgres

ROOT = Path(__file__).parents[2]
# Dagster and the runs take some seconds to stop; Postgres and Spark have 20.
STOP_SECONDS = 60.0
# A look at every asset costs the web server some tenths of a second.
_LOOK_SECONDS = 2.0
# The module that is loaded instead of the shipped one, and what tells it the changes.
DEFINITIONS, CHANGES_VARIABLE = "cdc_assets_tests.e2e.dev_definitions", "CDC_ASSETS_TEST_CHANGES"


@dataclass
class DevServer:
    """A running `dagster dev` with everything it started."""

    process: subprocess.Popen[bytes]
    port: int
    home: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, query: str, **variables: Any) -> Any:
        """The data of a GraphQL query; raises OSError while nobody answers."""
        request = urllib.request.Request(
            f"{self.url}/graphql",
            json.dumps({"query": query, "variables": variables}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            found = json.load(answer)
        assert "errors" not in found, found["errors"]
        return found["data"]

    def until(
        self, what: str, look: Callable[[], Any], seconds: float, every: float = _LOOK_SECONDS
    ) -> Any:
        """What ``look`` returns once it is true; the log's end if it never is."""
        deadline = time.monotonic() + seconds
        last: object = None
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"dagster dev ended: {self.log_tail()}"
            try:
                last = look()
            except (OSError, urllib.error.URLError) as error:
                last = error
            else:
                if last:
                    return last
            time.sleep(every)
        raise AssertionError(f"waited {seconds} s for {what}; last: {last}; {self.log_tail()}")

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join((self.home / "dev.log").read_text().splitlines()[-lines:])

    def family(self) -> list[psutil.Process]:
        """Every process that carries this server's home in its environment, or runs in it."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):  # it ends while we look, or isn't ours to look at
                mine = process.environ().get("CDC_ASSETS_HOME") == str(self.home)
                mine = mine or any(str(self.home) in word for word in process.cmdline())
                alive = process.status() != psutil.STATUS_ZOMBIE
                if mine and alive and process.pid != os.getpid():
                    found.append(process)
        return found

    def interrupt(self) -> None:
        """Ctrl-C's signal, to the one process that a person started."""
        self.process.send_signal(signal.SIGINT)


def _changed_workspace(home: Path) -> Path:
    shipped = (ROOT / "workspace.yaml").read_text()
    assert shipped.count(": cdc_assets.definitions\n") == 1
    workspace = home / "workspace.yaml"
    workspace.write_text(shipped.replace(": cdc_assets.definitions\n", f": {DEFINITIONS}\n"))
    return workspace


@contextmanager
def dev_server(
    folder: Path, *arguments: str, changes: Mapping[str, Any] | None = None
) -> Iterator[DevServer]:
    """Start it in the repository's root with homes of its own; whatever is left is killed.

    ``arguments`` come behind those that say where it listens. With ``changes`` it serves the
    shipped workspace, but these in the configuration of its source (``dev_definitions``).
    """
    home, dagster_home = folder / "home", folder / "home" / "dagster"
    dagster_home.mkdir(parents=True)
    shutil.copy(ROOT / "dagster.yaml", dagster_home)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"CDC_ASSETS_HOME": str(home), "DAGSTER_HOME": str(dagster_home)}
    if changes is not None:
        environment["FRESHNESS_DAEMON_INTERVAL_SECONDS"] = "10"  # Dagster's own; 30 by default
        environment[CHANGES_VARIABLE] = json.dumps(changes)
        arguments = (*arguments, "-w", str(_changed_workspace(home)))
    with (home / "dev.log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "dagster", "dev", "-h", "127.0.0.1", "-p", str(port)),
                *arguments,
            ],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=log,
            # A group of its own: the test's signals must not reach pytest.
            start_new_session=True,
        )
    server = DevServer(process, port, home)
    try:
        yield server
    finally:
        if process.poll() is None:
            server.interrupt()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            # Its services end by themselves once it has.
            psutil.wait_procs(server.family(), STOP_SECONDS)
        for left in server.family():
            with suppress(psutil.Error):
                left.kill()
        EmbeddedPostgres(home / "shop" / "postgres").remove()
