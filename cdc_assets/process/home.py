"""The runtime home: folders and files that are their owner's alone.

It has staged rows, lake tables, logs, and the addresses and tokens of our servers.
The mode of that one folder guards all of it: nobody else gets through it, whatever the umask
allowed below. So nothing sets a process's umask: it stays the user's, for the files that are
written elsewhere (a ``file://`` warehouse, say).
"""

from __future__ import annotations

import errno
import grp
import logging
import os
import pwd
import stat
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote

from cdc_assets.errors import EnvironmentProblem

_log = logging.getLogger(__name__)


def private_folder(path: Path) -> Path:
    """Make ``path`` with mode 0700, or give it that mode, and return it.

    Raises EnvironmentProblem if it can't be made, written to or given that mode; and if it is
    another user's or no folder, or others may write to it: then what is in it may be theirs.
    """
    try:
        with suppress(FileExistsError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700)
        found = path.stat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
            if found.st_mode & 0o077 and not _others_may_write(found):
                path.chmod(0o700)
                _log.warning("others could get to %s: its mode is 0700 now", path)
                found = path.stat()
            if found.st_mode & 0o077 == 0 and os.access(path, os.W_OK):
                return path
            if found.st_mode & 0o077 == 0:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
    except OSError as error:
        raise EnvironmentProblem(
            f"{path} can't be a folder of this user alone: {error.strerror}.",
            "Set CDC_ASSETS_HOME to a folder that this user may make, and write to.",
        ) from error
    raise EnvironmentProblem(
        f"{path} is {_whose(found)}, so what is in it can't be trusted.",
        "Set CDC_ASSETS_HOME to a folder of your own; on a volume that is mounted there, to one"
        f" below it, like {path / 'cdc_assets'}. If nobody else was at this one:"
        f" chown -R {os.geteuid()} '{path}'; chmod 700 '{path}'.",
    )


def write_private(path: Path, text: str) -> None:
    """Write a file of mode 0600 in one step: a reader finds all of it, or what was before."""
    half = path.with_suffix(f".{os.getpid()}.new")  # another process may write it, too
    half.unlink(missing_ok=True)
    descriptor = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as out:
        out.write(text)
    half.replace(path)


def _others_may_write(found: os.stat_result) -> bool:
    if found.st_mode & stat.S_IWOTH:
        return True
    return bool(found.st_mode & stat.S_IWGRP) and not _is_own_group(found.st_gid)


def _is_own_group(gid: int) -> bool:
    """Whether a group is this user's and nobody else's, as most systems give one to each user."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    alone = set(group.gr_mem) <= {user.pw_name}
    return gid == user.pw_gid and group.gr_name == user.pw_name and alone


def _whose(found: os.stat_result) -> str:
    if not stat.S_ISDIR(found.st_mode):
        return "no folder"
    if found.st_uid != os.geteuid():
        return f"the folder of user {found.st_uid}, not of {os.geteuid()}"
    return f"a folder that others may write to (mode {stat.S_IMODE(found.st_mode):04o})"


def at_home(place: str) -> str:
    """A hint for messages about what isn't at ``place``, if that is below a home by default.

    Whoever starts us in another folder has another home there. ``place`` may be a path, or a URI,
    whose names may be escaped (``%20``).
    """
    spelt = (place, unquote(place))
    if os.environ.get("CDC_ASSETS_HOME") or not any(str(_home()) in each for each in spelt):
        return ""
    return (
        f"Here the home is {_home()}. If it was made by a start in another folder, start there"
        " again, or set CDC_ASSETS_HOME to that folder's .cdc_assets. "
    )


def home() -> Path:
    """The folder of what this installation keeps at run time; ``$CDC_ASSETS_HOME`` moves it.

    It is made when it is first asked for, and nobody else gets through it. Raises
    EnvironmentProblem if others may have written there.
    """
    found = private_folder(_home())
    if not os.environ.get("CDC_ASSETS_HOME"):  # in somebody's project
        with suppress(OSError), (found / ".gitignore").open("x") as ignoring:
            ignoring.write("*\n")
    return found


def _home() -> Path:
    return Path(os.environ.get("CDC_ASSETS_HOME") or ".cdc_assets").absolute()
