"""A throw-away Postgres on 127.0.0.1, made for logical replication; one folder is one server.

Invariant: at most one server runs on a folder, and none outlives the process that asked for it.
Postgres is the child of a small guard, ``python -m cdc_assets.embedded.guard --directory D``,
which is a supervised child of ours (see :mod:`cdc_assets.process.children`). The guard holds a file
lock while it lives: a second one waits and takes over. When the guard's stdin ends it shuts
Postgres down; when the guard itself is killed, Linux passes the shutdown request on; where that is
missing, the next guard ends what it finds by its postmaster.pid.

``server.json`` in the folder (mode 0600) has port and password, which stay the same for the
folder's life, so that addresses survive a restart, and the server's pid while it runs.
"""

from __future__ import annotations

import logging
import shutil
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self, overload

from cdc_assets.embedded.binaries import (
    bundled_bindir,
    server_user,
    usable_data,
)
from cdc_assets.embedded.state import POLL_SECONDS, START_SECONDS, is_alive, read_state
from cdc_assets.errors import EnvironmentProblem
from cdc_assets.process import children as process

_log = logging.getLogger(__name__)


class EmbeddedPostgres:
    """The server of one folder; a context manager that starts and stops it."""

    def __init__(
        self,
        directory: Path,
        version: int = 18,
        bindir: Path | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = Path(directory).absolute()
        self.version = version
        self.bindir = bindir if bindir is not None else bundled_bindir(version)
        self.settings = dict(settings or {})

    @property
    def log_path(self) -> Path:
        return self.directory / "postgres.log"

    @property
    def _name(self) -> str:
        return f"postgres:{self.directory}"

    def program(self, name: str) -> Path:
        """A client program of the same installation, such as pgbench."""
        return self.bindir / name

    def dsn(self) -> str | None:
        """The address as a secret (it has the password), or None if the server doesn't run."""
        state = read_state(self.directory)
        if state is None or state.pid is None or not is_alive(state.pid):
            return None
        try:
            socket.create_connection(("127.0.0.1", state.port), timeout=2.0).close()
        except OSError:
            return None
        return state.dsn

    @overload
    def start(self, wait: Literal[True] = True) -> str: ...
    @overload
    def start(self, wait: Literal[False]) -> str | None: ...
    def start(self, wait: bool = True) -> str | None:
        """Make it run and return the address; call it as often as you like.

        A server that somebody else started is used as it is. Without ``wait`` it returns at once,
        with None until the server is up. Raises EnvironmentProblem if it doesn't come up.
        """
        deadline = time.monotonic() + START_SECONDS
        ours = process.child_of(self._name)
        dsn = self.dsn()
        if dsn is not None and ours is None:
            return dsn
        status = process.supervise(self._name, self._spec())
        if not wait:
            return dsn
        while (dsn := self.dsn()) is None:
            child = process.child_of(self._name)
            if child is None or not child.alive or time.monotonic() > deadline:
                code = child.returncode if child is not None else status.last_returncode
                why = "ended at once" if code is not None else f"is not up after {START_SECONDS} s"
                self.stop()
                raise EnvironmentProblem(
                    f"the embedded Postgres in {self.directory} {why}: {_last_line(self.log_path)}",
                    f"See {self.log_path}.",
                )
            time.sleep(POLL_SECONDS)
        return dsn

    def stop(self) -> None:
        """Stop the server if this process started it."""
        process.stop(self._name)

    def remove(self) -> None:
        """Stop the server if this process started it, and remove its data and folder."""
        self.stop()
        elsewhere = usable_data(self.directory, server_user())
        for path in (self.directory, elsewhere):
            if path.exists():
                shutil.rmtree(path)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _spec(self) -> process.ChildSpec:
        arguments = ["--directory", str(self.directory), "--bindir", str(self.bindir)]
        for key, value in sorted(self.settings.items()):
            arguments += ["--set", f"{key}={value}"]
        return process.ChildSpec("cdc_assets.embedded.guard", tuple(arguments), self.log_path)


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except FileNotFoundError:
        return "it left no log"
    return lines[-1] if lines else "its log is empty"
