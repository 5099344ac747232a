"""A throw-away Postgres on 127.0.0.1, made for logical replication; one folder is one server.

Invariant: at most one server runs on a folder, and none outlives the process that asked for it.
Postgres is the child of a small guard, ``python -m cdc_assets.embedded.postgres --directory D``,
which is a supervised child of ours (see :mod:`cdc_assets.process`). The guard holds a file lock
while it lives: a second one waits and takes over. When the guard's stdin ends it shuts Postgres
down; when the guard itself is killed, Linux passes the shutdown request on; where that is missing,
the next guard ends what it finds by its postmaster.pid.

``server.json`` in the folder (mode 0600) has port and password, which stay the same for the
folder's life, so that addresses survive a restart, and the server's pid while it runs.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, overload

import psutil
import psycopg

from cdc_assets import process
from cdc_assets.embedded.binaries import (
    bundled_bindir,
    own,
    server_user,
    usable_bindir,
    usable_data,
)
from cdc_assets.errors import EnvironmentProblem
from cdc_assets.private import write_private

_log = logging.getLogger(__name__)

# initdb takes 1-3 s and a start 0.2 s; a busy machine with a cold disk takes many times that.
START_SECONDS = 90.0
# A walsender whose receiver hangs delays a fast shutdown; an immediate one is safe, too.
_FAST_SECONDS = 12.0
_IMMEDIATE_SECONDS = 4.0
_POLL_SECONDS = 0.05
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

_SETTINGS = {
    "wal_level": "logical",
    "max_wal_senders": "20",  # a slot for every test that leaves one, and temporary ones for pins
    "max_replication_slots": "20",
    "max_connections": "100",
    "password_encryption": "scram-sha-256",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_min_messages": "warning",
    "log_checkpoints": "off",
}


@dataclass(frozen=True, slots=True)
class _State:
    port: int
    password: str = field(repr=False)
    pid: int | None = None
    """The postmaster's, while it accepts connections."""

    @property
    def dsn(self) -> str:
        return f"postgresql://postgres:{self.password}@127.0.0.1:{self.port}/postgres"


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
        state = _read_state(self.directory)
        if state is None or state.pid is None or not _is_alive(state.pid):
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
            time.sleep(_POLL_SECONDS)
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _spec(self) -> process.ChildSpec:
        arguments = ["--directory", str(self.directory), "--bindir", str(self.bindir)]
        for key, value in sorted(self.settings.items()):
            arguments += ["--set", f"{key}={value}"]
        return process.ChildSpec(__name__, tuple(arguments), self.log_path)


# -- the guard


class _Guard:
    """Runs one Postgres as its child, in the process that holds the folder's lock."""

    def __init__(self, directory: Path, bindir: Path, settings: Mapping[str, str]) -> None:
        self.directory = directory
        self.user = server_user()
        self.bindir = usable_bindir(bindir, self.user)
        self.data = usable_data(directory, self.user)
        self.settings = {**_SETTINGS, **settings}
        self.major = _major_version(self.bindir)

    def start(self) -> subprocess.Popen[bytes]:
        """A server that accepts connections, with its state written; raises EnvironmentProblem."""
        end_stale_server(self.data)
        self._take_along()
        state = _read_state(self.directory)
        if state is None:
            self._forget_data()
            state = _State(_free_port(), secrets.token_urlsafe(24))
        state = replace(state, pid=None)
        _write_state(self.directory, state)
        self._make_data(state.password)
        self._write_settings()
        deadline = time.monotonic() + START_SECONDS
        while True:
            if not _is_free(state.port):
                state = replace(state, port=_free_port())
            server = self._launch(state.port)
            if self._accepts(server, state, deadline):
                _write_state(self.directory, replace(state, pid=server.pid))
                return server
            # The port was taken in between, or a killed server's last process isn't gone yet.
            time.sleep(1.0)
            if time.monotonic() > deadline:
                raise EnvironmentProblem(f"Postgres in {self.data} does not come up.")

    def finish(self, server: subprocess.Popen[bytes]) -> None:
        """Shut the server down, fast at first, and say in the state that it is down."""
        for number, seconds in (
            (signal.SIGINT, _FAST_SECONDS),
            (signal.SIGQUIT, _IMMEDIATE_SECONDS),
            (signal.SIGKILL, _IMMEDIATE_SECONDS),
        ):
            if server.poll() is None:
                server.send_signal(number)
                with suppress(subprocess.TimeoutExpired):
                    server.wait(seconds)
        self.mark_down()

    def mark_down(self) -> None:
        state = _read_state(self.directory)
        if state is not None:
            _write_state(self.directory, replace(state, pid=None))

    def _forget_data(self) -> None:
        """The state, with the password, is gone: what is elsewhere belonged to a removed folder."""
        if not self.data.exists():
            return
        if self.data.is_relative_to(self.directory):
            raise EnvironmentProblem(
                f"{self.directory}/server.json with the password of {self.data} is gone.",
                f"Remove {self.directory} to begin anew.",
            )
        shutil.rmtree(self.data)

    def _take_along(self) -> None:
        """Data of when the server's user still got to the folder go where it gets to now."""
        inside = self.directory / "data"
        if inside == self.data or self.data.exists() or not inside.exists():
            return
        end_stale_server(inside)
        try:
            inside.rename(self.data)
        except OSError:  # another file system
            half = self.data.with_name(f"{self.data.name}-moved")
            shutil.rmtree(half, ignore_errors=True)
            shutil.copytree(inside, half, symlinks=True)
            for path in (half, *half.rglob("*")):
                own(path, self.user)
            half.rename(self.data)
            shutil.rmtree(inside)

    def _make_data(self, password: str) -> None:
        version_file = self.data / "PG_VERSION"
        if version_file.exists():
            found = version_file.read_text().strip()
            if found != str(self.major):
                raise EnvironmentProblem(
                    f"{self.data} was made by Postgres {found}, this is {self.major}.",
                    f"Set the version back, or remove {self.directory} to begin anew.",
                )
            return
        # Under another name until it is whole: a killed initdb leaves nothing that looks made.
        prefix = f"{self.data.name}-initdb-"
        for left in self.data.parent.glob(f"{prefix}*"):
            shutil.rmtree(left)
        half = Path(tempfile.mkdtemp(prefix=prefix, dir=self.data.parent))
        own(half, self.user)
        descriptor, secret = tempfile.mkstemp(dir=self.data.parent)  # mode 0600
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(password)
            own(Path(secret), self.user)
            made = self._popen(
                "initdb",
                *("--pgdata", str(half), "--username", "postgres", "--pwfile", secret),
                *("--auth", "scram-sha-256", "--encoding", "UTF8", "--locale", "C", "--no-sync"),
                cwd=half,
            )
            if made.wait() != 0:
                shutil.rmtree(half)
                raise EnvironmentProblem(f"initdb in {half} failed; its messages are above.")
        finally:
            Path(secret).unlink()
        with (half / "postgresql.conf").open("a") as conf:
            conf.write("\ninclude_if_exists = 'cdc_assets.conf'\n")
        half.rename(self.data)

    def _write_settings(self) -> None:
        lines = (f"{key} = '{value}'\n" for key, value in self.settings.items())
        path = self.data / "cdc_assets.conf"
        path.write_text("".join(lines))
        own(path, self.user)

    def _launch(self, port: int) -> subprocess.Popen[bytes]:
        # On the command line only what nothing may override: loopback, no socket file.
        return self._popen(
            "postgres",
            *("-D", str(self.data), "-p", str(port), "-c", "listen_addresses=127.0.0.1"),
            *("-c", "unix_socket_directories="),
            cwd=self.data,
        )

    def _popen(self, program: str, *arguments: str, cwd: Path) -> subprocess.Popen[bytes]:
        # Of the environment only what finds libraries: PGPORT, PGDATA and the like mislead.
        kept = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
        environment = {key: os.environ[key] for key in kept if key in os.environ}
        user = self.user
        return subprocess.Popen(
            [str(self.bindir / program), *arguments],
            stdin=subprocess.DEVNULL,
            cwd=cwd,
            env={**environment, "LC_ALL": "C", "TZ": "UTC"},
            start_new_session=True,
            user=user.uid if user else None,
            group=user.gid if user else None,
            extra_groups=[] if user else None,
            preexec_fn=_shutdown_with_parent(),  # noqa: PLW1509 - the guard has one idle thread
        )

    @staticmethod
    def _accepts(server: subprocess.Popen[bytes], state: _State, deadline: float) -> bool:
        """Wait until it takes a connection (True) or ends (False)."""
        while server.poll() is None and time.monotonic() < deadline:
            try:
                psycopg.connect(state.dsn, connect_timeout=2).close()
            except psycopg.OperationalError:
                time.sleep(_POLL_SECONDS)
            else:
                return True
        return False


def end_stale_server(data: Path) -> None:
    """End the server that still runs on ``data`` although whoever started it is gone."""
    try:
        pid = int((data / "postmaster.pid").read_text().split("\n", 1)[0])
        stale = psutil.Process(pid)
        if str(data) not in stale.cmdline():
            return  # the number belongs to another process now
    except (OSError, ValueError, psutil.NoSuchProcess):
        return
    _log.warning("ending the Postgres (pid %s) that was left behind on %s", pid, data)
    for number, seconds in (
        (signal.SIGINT, _FAST_SECONDS),
        (signal.SIGQUIT, _IMMEDIATE_SECONDS),
        (signal.SIGKILL, _IMMEDIATE_SECONDS),
    ):
        with suppress(psutil.NoSuchProcess):
            stale.send_signal(number)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not _is_alive(pid):
                return
            time.sleep(_POLL_SECONDS)


def _is_alive(pid: int) -> bool:
    """Does it run; one that ended and that its parent hasn't noticed (a zombie) doesn't."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _shutdown_with_parent() -> Callable[[], None] | None:
    """What the server's process does before it becomes Postgres: ask for SIGINT at our death."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    parent = os.getpid()

    def request() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGINT), 0, 0, 0)
        if os.getppid() != parent:  # it died before the request
            os._exit(1)

    return request


def _major_version(bindir: Path) -> int:
    said = subprocess.run(
        [str(bindir / "postgres"), "--version"], capture_output=True, text=True, check=True
    ).stdout
    # "postgres (PostgreSQL) 18.1", Debian adds its package's version
    return int(said.split(")", 1)[1].split()[0].split(".")[0])


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _read_state(directory: Path) -> _State | None:
    try:
        return _State(**json.loads((directory / "server.json").read_text()))
    except FileNotFoundError:
        return None


def _write_state(directory: Path, state: _State) -> None:
    """Replace the state file in one step; only its owner can read it."""
    write_private(directory / "server.json", json.dumps(asdict(state)))


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except FileNotFoundError:
        return "it left no log"
    return lines[-1] if lines else "its log is empty"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the guard until stdin ends or a signal comes."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=__doc__)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--bindir", type=Path, help="default: the bundled Postgres 18")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="settings")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    stopping = process.die_with_parent()
    directory: Path = options.directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "server.lock").open("w") as lock:
        if not process.acquire(lock, stopping):
            return 0
        settings = dict(item.split("=", 1) for item in options.settings)
        guard = _Guard(directory, options.bindir or bundled_bindir(18), settings)
        try:
            server = guard.start()
        except EnvironmentProblem as problem:
            sys.stderr.write(f"{problem}\n")
            return 1
        try:
            while not stopping.wait(0.5):
                if server.poll() is not None:
                    sys.stderr.write(f"Postgres ended with {server.returncode}\n")
                    return 1
        finally:
            guard.finish(server)
    return 0


if __name__ == "__main__":
    sys.exit(main())
