"""The archive of the classes that Spark loads, with which its JVM starts in two thirds of the time.

A start loads and verifies some 20,000 classes, 3 s of CPU; those of copies and merges follow. Java
maps them from a file instead, if one was made (``spark.record``), and goes without where the file
isn't of this very Java and these very jars. It is code, so it is kept where the jars are: in a
folder of the user's own.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from cdc_assets.errors import EnvironmentProblem
from cdc_assets.lake.spark.jars import cache_folder
from cdc_assets.process.machine import java_command

_OPTION = "-XX:SharedArchiveFile="
# Java compares all of the class path with the archive, and says what differs.
_SILENT = "-Xlog:cds=off -Xlog:cds+dynamic=off -Xlog:class+path=off"


def archive_path(class_path: str) -> Path:
    """Where the archive is, or would be, of the Java that would be started and of its jars.

    ``class_path``: of our jars, as ``jars.provided`` has it. Raises EnvironmentProblem if the user
    has no folder of their own.
    """
    told = hashlib.sha256("\n".join(_told(class_path)).encode()).hexdigest()
    return cache_folder().with_name("classes") / f"{told[:16]}.jsa"


def sharing_options(class_path: str) -> str:
    """The options of a JVM that uses the archive; none without one that is the user's alone."""
    try:
        archive = archive_path(class_path)
        if any(_is_others(path) for path in (archive.parent, archive)):
            return ""
    except (EnvironmentProblem, OSError):  # there is none, or nobody may look
        return ""
    if any(character.isspace() for character in str(archive)):  # the options are one string
        return ""
    return f"{_OPTION}{archive} {_SILENT}"


def remove_archive(class_path: str) -> None:
    """Java looks whether it is the right file, but not whether all of it is as it was written."""
    with suppress(EnvironmentProblem, OSError):
        archive_path(class_path).unlink(missing_ok=True)


def _is_others(path: Path) -> bool:
    found = path.stat()
    return found.st_uid not in (os.getuid(), 0) or bool(found.st_mode & 0o022)


def _told(class_path: str) -> Iterator[str]:
    java = Path(java_command(os.environ) or "java").resolve()
    yield _file(java)
    spark = find_spec("pyspark")
    assert spark is not None
    for place in spark.submodule_search_locations or ():
        yield from (_file(jar) for jar in sorted(Path(place, "jars").glob("*.jar")))
    yield from (_file(Path(jar)) for jar in class_path.split(os.pathsep) if jar)


def _file(path: Path) -> str:
    found = path.stat() if path.exists() else None
    return f"{path} {found.st_size} {found.st_mtime_ns}" if found else str(path)
