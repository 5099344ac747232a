"""Places of our files: the only code that decides whether a path may be deleted, and deletes it.

A path comes from the log, a catalog or a listing, and anyone with write access there can write any
path. So it is checked against a *place*, a folder that the configuration gives: normalized, on the
same storage, and strictly below it, also where a symbolic link leads elsewhere. All paths of a call
are checked before the first file goes.

``staged_places`` gives a source's folders; ``lake.place`` a lake table's.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from pyarrow import fs

from cdc_assets.errors import CdcError, TableProblem
from cdc_assets.log.staged.storage import Storage
from cdc_assets.messages.texts import command
from cdc_assets.postgres.names import TableId
from cdc_assets.process.home import at_home

if TYPE_CHECKING:
    from cdc_assets.config.source import SourceConfig

# Deletions wait for an object store, not for the processor.
_PARALLEL = 8
_KNOWN = re.compile(r"\A(?:file:///(?!/)|(?:file:)?/(?!/)|s3://[^/])")
_ODD = re.compile(r"[\x00-\x1f\x7f]")
# A flusher's file, below its source's folder: a table's folder, a day, a random name.
_STAGED = re.compile(r"\A[A-Za-z0-9_.-]+/\d{4}-\d\d-\d\d/[A-Za-z0-9_-]+\.parquet\Z")
# What ``storage.check_place`` stores.
_PROBE = re.compile(r"\A\.writable[a-f0-9-]*\Z")


class ForeignPath(CdcError):
    """A path isn't below the folder that it belongs to."""

    def __init__(self, path: str, folder: str) -> None:
        super().__init__(f"{path!r} isn't below {folder}: it is neither read nor removed.")


@dataclass(frozen=True, slots=True)
class Place:
    """A folder of ours, as a URI; ``literal``: URIs there are Iceberg's, with nothing encoded.

    ``lent``: it is another source's, which alone removes files there.
    """

    uri: str
    storage: Storage
    literal: bool = False
    lent: bool = False

    def __post_init__(self) -> None:
        if not _KNOWN.match(self.uri) or _segments(self.root) is None:
            raise ForeignPath(self.uri, "a folder of file:/// or s3://")

    @property
    def root(self) -> str:
        """The folder's path on its file system."""
        return self._located(self.uri)

    @property
    def filesystem(self) -> fs.FileSystem:
        return self.storage.locate(self.uri)[0]

    @property
    def _is_local(self) -> bool:
        return not self.uri.startswith("s3:")

    def holds(self, uri: str) -> bool:
        """Whether the URI names something strictly below the folder."""
        with suppress(ForeignPath):
            return bool(self.path(uri))
        return False

    def path(self, uri: str) -> str:
        """The URI's path on the file system. Raises ForeignPath unless it is below the folder."""
        same = _KNOWN.match(uri) and uri.startswith("s3:") != self._is_local
        path = self._located(uri)
        if not same or self.below(path) is None:
            raise ForeignPath(uri, self.uri)
        return path

    def _located(self, uri: str) -> str:
        path = uri if self.literal else unquote(uri)
        if not self._is_local:
            return path.removeprefix("s3://")
        return "/" + path.removeprefix("file:").lstrip("/")

    def below(self, path: str) -> str | None:
        """A file system path relative to the folder; None if it isn't below the folder."""
        root, segments = _segments(self.root), _segments(path)
        if root is None or segments is None:
            return None
        if len(segments) > len(root) and segments[: len(root)] == root:
            return "/".join(segments[len(root) :])
        return self._really_below(path) if self._is_local else None

    def _really_below(self, path: str) -> str | None:
        """Like ``below``, with links resolved; a link as the last part is deleted itself."""
        folder, name = os.path.split(path)
        root, real = _segments(os.path.realpath(self.root)), _segments(os.path.realpath(folder))
        if not name or _segments(path) is None or root is None or real is None:
            return None
        if real[: len(root)] != root:
            return None
        return "/".join([*real[len(root) :], name])

    def delete(self, paths: Iterable[str]) -> tuple[int, int]:
        """Delete files; returns their number and bytes, without files that are gone already.

        ``paths`` are the file system's; of a lent place none. Raises ForeignPath, having deleted
        nothing.
        """
        paths = [] if self.lent else list(paths)
        below = self._really_below if self._is_local else self.below
        for path in paths:
            if below(path) is None:
                raise ForeignPath(path, self.uri)

        def remove(path: str) -> int | None:
            info = self.filesystem.get_file_info(path)
            with suppress(FileNotFoundError):
                if info.is_file:
                    self.filesystem.delete_file(path)
                    return info.size or 0
            return None

        with ThreadPoolExecutor(_PARALLEL, "deletion") as pool:
            sizes = [size for size in pool.map(remove, paths) if size is not None]
        return len(sizes), sum(sizes)

    def delete_empty(self, folders: Iterable[str]) -> None:
        """Delete empty folders, the deepest first; an object store has none."""
        if self._is_local and not self.lent:
            for folder in sorted(folders, key=lambda path: -path.count("/")):
                if folder == self.root or self._really_below(folder) is not None:
                    with suppress(OSError):  # not empty, or gone
                        Path(folder).rmdir()


def _segments(path: str) -> list[str] | None:
    """The names that a path consists of, None if one of them isn't a plain name."""
    names = path.strip("/").split("/") if path.strip("/") else []
    if _ODD.search(path) or any(name in ("", ".", "..") for name in names):
        return None
    return names


def staged_places(config: SourceConfig) -> tuple[Place, ...]:
    """The places of the staged files of its log; the one that is written to comes first."""
    storage, lent = Storage.of(config.s3), config.log is not None
    uris = (config.staging_uri, *config.staging.former_uris)
    return tuple(Place(f"{u.rstrip('/')}/{config.log_name}", storage, lent=lent) for u in uris)


def staged_files(place: Place) -> list[fs.FileInfo]:
    """Every file in one of the source's places that we may have written."""
    selector = fs.FileSelector(place.root, allow_not_found=True, recursive=True)
    found = place.filesystem.get_file_info(selector)

    def is_ours(path: str) -> bool:
        return bool(_STAGED.match(path) or _PROBE.match(path))

    return [info for info in found if info.is_file and is_ours(place.below(info.path) or "")]


def staged_place(places: Sequence[Place], uri: str) -> Place | None:
    """The source's place that a staged file is in; None if it isn't a staged file of the source."""
    for place in places:
        with suppress(ForeignPath):
            path = place.path(uri)
            if _STAGED.match(place.below(path) or ""):
                return place
    return None


def foreign_entry(table: TableId, path: str, places: Sequence[Place]) -> TableProblem:
    """The log names a file that the flusher of this source has never written."""
    where = " or ".join(place.uri for place in places)
    return TableProblem(
        table,
        f"its log names {path!r}, which is no staged file below {where}: it is neither read nor"
        " removed",
        f"{at_home(where)}If staging.uri was another one, say so in staging.former_uris. If not,"
        f" somebody wrote into log_index: delete that entry, and: {command('resync', table)}",
    )
