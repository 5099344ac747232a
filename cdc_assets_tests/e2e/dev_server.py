"""`dagster dev` as a person starts it, asked through GraphQL; and a picture of the lineage."""

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil

ROOT = Path(__file__).parents[2]
# Dagster and the runs take some seconds to stop; Postgres and Spark have 20.
STOP_SECONDS = 60.0


@dataclass
class DevServer:
    """A running `dagster dev` with everything it started."""

    process: subprocess.Popen[bytes]
    port: int
    home: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, query: str) -> Any:
        """The data of a GraphQL query; raises OSError while nobody answers."""
        request = urllib.request.Request(
            f"{self.url}/graphql",
            json.dumps({"query": query}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            found = json.load(answer)
        assert "errors" not in found, found["errors"]
        return found["data"]

    def until(self, what: str, look: Callable[[], Any], seconds: float) -> Any:
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
            time.sleep(1.0)
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


@contextmanager
def dev_server(folder: Path, *arguments: str) -> Iterator[DevServer]:
    """Start it in the repository's root with homes of its own; whatever is left is killed.

    ``arguments`` come behind those that say where it listens.
    """
    home, dagster_home = folder / "home", folder / "home" / "dagster"
    dagster_home.mkdir(parents=True)
    home.chmod(0o755)
    shutil.copy(ROOT / "dagster.yaml", dagster_home)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"CDC_ASSETS_HOME": str(home), "DAGSTER_HOME": str(dagster_home)}
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
        for left in server.family():
            with suppress(psutil.Error):
                left.kill()


# Three tables are enough to see, and few enough to read.
_SHOWN = " or ".join(
    f'+key:"shop/{table}"+' for table in ("pgbench_accounts", "orders", "Mixed_Case_Table")
)


def screenshot(server: DevServer, target: Path, folder: Path) -> None:
    """The asset lineage in a headless browser; raises FileNotFoundError without chromium."""
    profile = folder / "browser"
    profile.mkdir()
    target.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [
            "chromium",
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            f"--user-data-dir={profile}",
            "--window-size=1900,1500",
            "--virtual-time-budget=60000",
            f"--screenshot={target}",
            f"{server.url}/asset-groups~{quote(_SHOWN, safe='')}",
        ],
        check=True,
        timeout=180,
        capture_output=True,
    )
