"""A home is of one user alone: others get nothing from it, and put nothing there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psycopg
import pytest

from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.errors import EnvironmentProblem
from cdc_assets.process.home import home, private_folder

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


def test_a_home_that_others_got_to_is_closed_to_them_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CDC_ASSETS_HOME", str(tmp_path / "new" / "home"))
    assert home().stat().st_mode & 0o777 == 0o700
    assert not caplog.messages
    home().chmod(0o755)
    assert home().stat().st_mode & 0o777 == 0o700
    home()
    assert caplog.messages == [f"others could get to {home()}: its mode is 0700 now"]


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702])
def test_a_home_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(EnvironmentProblem, match=rf"may write to \(mode {mode:04o}\).*chmod 700"):
        private_folder(tmp_path)
    assert tmp_path.stat().st_mode & 0o7777 == mode


@as_root
def test_a_home_of_another_user_or_their_group_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 65534, 0)
    with pytest.raises(EnvironmentProblem, match=r"user 65534, not of 0.* CDC_ASSETS_HOME"):
        private_folder(tmp_path)
    os.chown(tmp_path, 0, 65534)
    tmp_path.chmod(0o770)
    with pytest.raises(EnvironmentProblem, match="others may write to"):
        private_folder(tmp_path)
    os.chown(tmp_path, 0, 0)  # this user's own group, with nobody else in it
    assert private_folder(tmp_path).stat().st_mode & 0o777 == 0o700


ASKS = """
import os, sys, pathlib, cdc_assets.process.home as private
if sys.argv[2:]:
    os.setgroups([]), os.setgid(int(sys.argv[3])), os.setuid(int(sys.argv[2]))
private.private_folder(pathlib.Path(sys.argv[1]))
"""


def _asked_for(folder: Path, *user: str, before: Sequence[str] = ()) -> str:
    """The last line of a process that makes the folder private, as user and group if given."""
    done = subprocess.run(
        [*before, sys.executable, "-c", ASKS, str(folder), *user],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stderr.strip().rpartition("\n")[2]


@as_root
def test_a_home_that_cannot_be_made_or_closed_is_named(tmp_path: Path) -> None:
    said = "can't be a folder of this user alone"
    for folder, why in (
        (Path("/proc/none/home"), "No such file"),
        (Path("/proc/self/task"), "Operation not permitted"),
    ):
        with pytest.raises(EnvironmentProblem, match=rf"{folder} {said}: {why}.*CDC_ASSETS_HOME"):
            private_folder(folder)


@as_root
def test_a_home_on_a_mount_that_takes_no_writes_is_named(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    for mode, folder in (("700", tmp_path), ("755", tmp_path), ("700", tmp_path / "new")):
        mounted = f'mount -t tmpfs -o ro,mode={mode} none {tmp_path} && exec "$@"'
        found = _asked_for(folder, before=("unshare", "--mount", "sh", "-c", mounted, "sh"))
        assert f"{folder} can't be a folder of this user alone: Read-only file system" in found


@as_root
def test_a_volume_that_is_roots_is_named_with_a_folder_below_it(public_directory: Path) -> None:
    """As Kubernetes mounts one: of root and the pod's group, which may write."""
    volume = public_directory / "volume"
    volume.mkdir()
    os.chown(volume, 0, 65534)
    volume.chmod(0o2775)
    found = _asked_for(volume, "65533", "65534")
    assert "the folder of user 0, not of 65533" in found
    below = volume / "cdc_assets"
    assert f"to one below it, like {below}" in found
    assert _asked_for(below, "65533", "65534") == ""
    assert below.stat().st_mode & 0o777 == 0o700


def test_a_command_in_such_a_home_says_what_to_do(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    settings = {
        "name": "src",
        "postgres": {"dsn": "postgresql://u@127.0.0.1:1/x"},
        "tables": [{"name": "t"}],
    }
    file = tmp_path / "source.json"
    file.write_text(json.dumps(settings))
    done = subprocess.run(
        [sys.executable, "-m", "cdc_assets", "--config", str(file), "materialize"],
        env={**os.environ, "CDC_ASSETS_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    said = " ".join(done.stderr.split())
    assert done.returncode == 1
    assert "may write to (mode 0777), so what is in it can't be trusted." in said
    assert "Set CDC_ASSETS_HOME to a folder of your own" in said


@as_root
def test_an_embedded_postgres_keeps_its_data_when_its_home_is_closed(
    public_directory: Path,
) -> None:
    folder = public_directory / "was open"
    folder.mkdir(mode=0o755)
    made = EmbeddedPostgres(folder / "src" / "postgres", settings={"fsync": "off"})
    with made, psycopg.connect(made.start(), autocommit=True) as connection:
        connection.execute("create table kept as select 1 as one")
    assert (made.directory / "data" / "PG_VERSION").exists()
    private_folder(folder)
    try:
        with made, psycopg.connect(made.start()) as connection:
            assert connection.execute("select one from kept").fetchone() == (1,)
        assert not (made.directory / "data").exists()
    finally:
        made.remove()
