"""What runs on machines of their own: Postgres, and functions of ours."""

from __future__ import annotations

import os
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import psycopg

from cdc_assets.embedded.binaries import bundled_bindir, own, server_user, usable_bindir
from cdc_assets_tests.support.machines import Machine

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Inside:
    """A process of ours in a machine's network."""

    pool: ProcessPoolExecutor

    def run(self, do: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function of a module there; what it is given and returns can be pickled."""
        return self.pool.submit(_sendable, do, *arguments).result()


@contextmanager
def inside(machine: Machine, environment: Mapping[str, str]) -> Iterator[Inside]:
    """It has this process's environment, and what is given."""
    context = get_context("spawn")
    with ProcessPoolExecutor(1, context, _arrive, (machine, dict(environment))) as pool:
        yield Inside(pool)


def _arrive(machine: Machine, environment: dict[str, str]) -> None:
    machine.enter_network()
    os.environ |= environment


def _sendable(do: Callable[..., Result], *arguments: Any) -> Result:
    """An error of PySpark's ends who receives it from another process: it is told as a text."""
    try:
        return do(*arguments)
    except Exception:  # noqa: BLE001 - whatever it is
        raise AssertionError(traceback.format_exc()) from None


def start_postgres(machine: Machine, folder: Path, password: str, clients: str) -> None:
    """Start a server for ``clients`` (addresses, as pg_hba.conf has them); ``folder`` has its log.

    Its superuser is ``postgres``. :func:`await_postgres` waits for it.
    """
    user = server_user()
    assert user is not None
    bindir = usable_bindir(bundled_bindir(18), user)
    data, secret = folder / "data", folder / "secret"
    data.mkdir(mode=0o700)
    secret.write_text(password)
    for path in (data, secret):
        own(path, user)
    secret.chmod(0o600)
    given = ("--username=postgres", f"--pwfile={secret}", "--auth=scram-sha-256", "--no-sync")
    subprocess.run(
        [bindir / "initdb", "-D", data, *given, "--locale=C", "--encoding=UTF8"],
        check=True,
        stdout=subprocess.DEVNULL,
        user=user.uid,
        group=user.gid,
        cwd=data,
    )
    with (data / "pg_hba.conf").open("a") as rules:
        rules.write(f"host all,replication all {clients} scram-sha-256\n")
    settings = ("listen_addresses=*", "unix_socket_directories=", "wal_level=logical", "fsync=off")
    options = [part for setting in settings for part in ("-c", setting)]
    command = (str(bindir / "postgres"), "-D", str(data), *options)
    environment = {"LC_ALL": "C", "TZ": "UTC"}
    machine.start(command, environment, folder / "postgres.log", user.uid)


def await_postgres(dsn: str) -> None:
    """Return once it lets one in."""
    for left in reversed(range(150)):
        try:
            psycopg.connect(dsn, connect_timeout=5).close()
        except psycopg.OperationalError:
            if not left:
                raise
            time.sleep(0.2)
        else:
            return
