"""Runs one Postgres as its child, and shuts it down when its own parent is gone."""

from __future__ import annotations

import argparse
import ctypes
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
from dataclasses import replace
from pathlib import Path

import psutil
import psycopg

from cdc_assets.embedded.binaries import (
    bundled_bindir,
    own,
    server_user,
    usable_bindir,
    usable_data,
)
from cdc_assets.embedded.state import (
    POLL_SECONDS,
    START_SECONDS,
    State,
    is_alive,
    read_state,
    write_state,
)
from cdc_assets.errors import EnvironmentProblem
from cdc_assets.process import lifeline

_log = logging.getLogger(__name__)


# A fast shutdown, an immediate one, and the end, with the seconds that each may take. A walsender
# whose receiver hangs delays a fast one; an immediate one is safe, too.
_SHUTDOWN = ((signal.SIGINT, 12.0), (signal.SIGQUIT, 4.0), (signal.SIGKILL, 4.0))
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


class Guard:
    """Runs one Postgres as its child, in the process that holds the folder's lock."""

    def __init__(self, directory: Path, bindir: Path, settings: Mapping[str, str]) -> None:
        self.directory = directory
        self.user = server_user()
        self.bindir = usable_bindir(bindir, self.user)
        self.data = usable_data(directory, self.user)
        self.settings = {**_SETTINGS, **settings}
        self.major = _major_version(self.bindir)

    def start(self) -> subprocess.Popen[bytes]:
        """Start a server that accepts connections, write its state; raises EnvironmentProblem."""
        end_stale_server(self.data)
        self._take_along()
        state = read_state(self.directory)
        if state is None:
            self._forget_data()
            state = State(_free_port(), secrets.token_urlsafe(24))
        state = replace(state, pid=None)
        write_state(self.directory, state)
        self._make_data(state.password)
        self._write_settings()
        deadline = time.monotonic() + START_SECONDS
        while True:
            if not _is_free(state.port):
                state = replace(state, port=_free_port())
            server = self._launch(state.port)
            if self._accepts(server, state, deadline):
                write_state(self.directory, replace(state, pid=server.pid))
                return server
            # The port was taken in between, or a killed server's last process isn't gone yet.
            time.sleep(1.0)
            if time.monotonic() > deadline:
                raise EnvironmentProblem(f"Postgres in {self.data} does not come up.")

    def finish(self, server: subprocess.Popen[bytes]) -> None:
        """Shut the server down, fast at first, and record in the state that it is down."""
        for number, seconds in _SHUTDOWN:
            if server.poll() is None:
                server.send_signal(number)
                with suppress(subprocess.TimeoutExpired):
                    server.wait(seconds)
        state = read_state(self.directory)
        if state is not None:
            write_state(self.directory, replace(state, pid=None))

    def _forget_data(self) -> None:
        """Remove data without a state (and password): data elsewhere is of a removed folder."""
        if not self.data.exists():
            return
        if self.data.is_relative_to(self.directory):
            raise EnvironmentProblem(
                f"{self.directory}/server.json with the password of {self.data} is gone.",
                f"Remove {self.directory} to begin anew.",
            )
        shutil.rmtree(self.data)

    def _take_along(self) -> None:
        """Move data out of a folder that the server's user could reach once, and can't now."""
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
        # Under another name until it is whole: a killed initdb leaves nothing that looks complete.
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
        # Only the environment that finds libraries: PGPORT, PGDATA and the like mislead.
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
    def _accepts(server: subprocess.Popen[bytes], state: State, deadline: float) -> bool:
        """Wait until it takes a connection (True) or ends (False)."""
        while server.poll() is None and time.monotonic() < deadline:
            try:
                psycopg.connect(state.dsn, connect_timeout=2).close()
            except psycopg.OperationalError:
                time.sleep(POLL_SECONDS)
            else:
                return True
        return False


def end_stale_server(data: Path) -> None:
    """End the server that still runs on ``data`` although the process that started it is gone."""
    try:
        pid = int((data / "postmaster.pid").read_text().split("\n", 1)[0])
        stale = psutil.Process(pid)
        if str(data) not in stale.cmdline():
            return  # the number belongs to another process now
    except (OSError, ValueError, psutil.NoSuchProcess):
        return
    _log.warning("ending the Postgres (pid %s) that was left behind on %s", pid, data)
    for number, seconds in _SHUTDOWN:
        with suppress(psutil.NoSuchProcess):
            stale.send_signal(number)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not is_alive(pid):
                return
            time.sleep(POLL_SECONDS)


def _shutdown_with_parent() -> Callable[[], None] | None:
    """The server process's step before it becomes Postgres: ask for SIGINT at our death."""
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the guard until stdin ends or a signal comes."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=__doc__)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--bindir", type=Path, help="default: the bundled Postgres 18")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="settings")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    stopping = lifeline.die_with_parent()
    directory: Path = options.directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "server.lock").open("w") as lock:
        if not lifeline.acquire(lock, stopping):
            return 0
        settings = dict(item.split("=", 1) for item in options.settings)
        guard = Guard(directory, options.bindir or bundled_bindir(18), settings)
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
