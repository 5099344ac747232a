"""Storage of staged files: reaching the staging place, and writing there durably."""

from __future__ import annotations

import errno
import logging
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlparse

import pyarrow as pa
from pyarrow import fs

from cdc_assets.errors import StagingProblem, first_line
from cdc_assets.postgres.names import TableId, safe_folder

if TYPE_CHECKING:  # the decoder process has no use for what a configuration takes: 30 MB
    from cdc_assets.config.sections import S3Config

# No progress for this long (libcurl adds some 6 s), and a request to an object store has failed: a
# hang is bounded, while a large object over a slow line isn't hurried.
S3_CONNECT_SECONDS = 5.0
S3_REQUEST_SECONDS = 10.0
# Tries of one request before its caller hears of the failure.
S3_ATTEMPTS = 2
# By the variables that name another file.
_FILES_OF_KEYS = {
    "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials",
    "AWS_CONFIG_FILE": "~/.aws/config",
}


@dataclass(frozen=True, slots=True)
class Storage:
    """How to reach files from any process; without a key, the environment's is used."""

    endpoint: str | None = None
    region: str | None = None
    path_style: bool = False
    key: tuple[str, str, str | None] | None = field(default=None, repr=False)
    """Its id, its secret, and the token of one that ends."""

    @classmethod
    def of(cls, s3: S3Config, given: Mapping[str, str] | None = None) -> Storage:
        """``given``: properties of a table's files, which come first: catalogs lend keys."""
        given = given or {}
        found = given if {"s3.access-key-id", "s3.secret-access-key"} <= given.keys() else s3.key
        key = None
        if found:
            one, secret = found["s3.access-key-id"], found["s3.secret-access-key"]
            key = (one, secret, found.get("s3.session-token"))
        endpoint = given.get("s3.endpoint") or s3.endpoint
        region = given.get("s3.region") or given.get("client.region") or s3.region
        path_style = s3.path_style or given.get("s3.path-style-access") == "true"
        return cls(endpoint, region, path_style, key)

    def locate(self, uri: str, *, literal: bool = False) -> tuple[fs.FileSystem, str]:
        """The pyarrow filesystem of a ``file://`` or ``s3://`` URI, and the path in it.

        ``literal``: nothing in the URI is encoded, as in Iceberg; Hadoop writes ``file:/``.
        """
        if literal:
            if uri.startswith("s3://"):
                return _object_store(self, files_of_keys()), uri.removeprefix("s3://")
            return fs.LocalFileSystem(), "/" + uri.removeprefix("file:").lstrip("/")
        parsed = urlparse(uri)
        if parsed.scheme == "s3":
            return _object_store(self, files_of_keys()), unquote(parsed.netloc + parsed.path)
        return fs.LocalFileSystem(), unquote(parsed.path)


def files_of_keys() -> tuple[tuple[str, int, int], ...]:
    """The files where AWS's clients find keys, and when they were written.

    A client of pyarrow goes on with a key that it found in a file when it was made.
    """
    found = []
    for variable, default in _FILES_OF_KEYS.items():
        with suppress(OSError, RuntimeError):  # there is none, or no home
            path = Path(os.environ.get(variable) or default).expanduser()
            status = path.stat()
            found.append((str(path), status.st_ino, status.st_mtime_ns))
    return tuple(found)


@lru_cache(maxsize=16)
def _object_store(storage: Storage, _keys: object) -> fs.FileSystem:
    """One client per process and place, so that its connections are used again."""
    options: dict[str, object] = {}
    if storage.endpoint:
        options["endpoint_override"] = storage.endpoint
        options["force_virtual_addressing"] = not storage.path_style
    if storage.region:
        options["region"] = storage.region
    if storage.key is not None:
        names = ("access_key", "secret_key", "session_token")
        options |= zip(names, storage.key, strict=True)
    return fs.S3FileSystem(
        connect_timeout=S3_CONNECT_SECONDS,
        request_timeout=S3_REQUEST_SECONDS,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=S3_ATTEMPTS),
        # An object of less than a part (10 MB) is one request instead of three.
        allow_delayed_open=True,
        **options,
    )


logger = logging.getLogger(__name__)


# Errors that waiting doesn't mend: of a file system …
_PERMANENT_ERRNOS = frozenset(
    {
        errno.EACCES,
        errno.EEXIST,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOTDIR,
        errno.EPERM,
        errno.EROFS,
    }
)
# … and of an object store, as the AWS SDK's messages name them.
_PERMANENT_S3 = (
    "ACCESS_DENIED",
    "INVALID_ACCESS_KEY_ID",
    "NO_SUCH_BUCKET",
    "SIGNATURE_DOES_NOT_MATCH",
)
# Where shared files are, beside the tables' folders, whose names all have a dot.
SHARED_FOLDER = "shared"


def folder_name(table: TableId) -> str:
    """A unique folder name for the table, of letters, digits and ``_ . -``, safe anywhere.

    A name that had to be changed gets a hash, so that no two tables share a folder.
    """
    dotted = "." in table.schema + table.name  # schema a.b and table c, or a and b.c?
    return safe_folder(f"{table.schema}.{table.name}", str(table) if dotted else None)


def check_place(uri: str, source: str, storage: Storage, *, leave_nothing: bool = False) -> None:
    """Check a place by storing a small file; with ``leave_nothing``, remove the file again.

    Raises StagingProblem for errors that a person has to correct. A place that is full or down for
    now is only logged: the flusher waits for it, and the slot keeps the WAL meanwhile.
    """
    name = f".writable-{uuid.uuid4().hex}" if leave_nothing else ".writable"
    probe = f"{uri.rstrip('/')}/{source}/{name}"
    with _removed(probe, storage) if leave_nothing else nullcontext():
        try:
            store(storage, probe, pa.py_buffer(b"cdc_assets can write here\n"))
        except OSError as error:
            said = first_line(error)
            if error.errno in _PERMANENT_ERRNOS or any(name in said for name in _PERMANENT_S3):
                raise StagingProblem(
                    f"the staging place {uri} can't be written: {said}.",
                    "Correct staging.uri (and s3:), or what stands in the way: the folder or the"
                    " bucket must exist and allow this process to write"
                    + (
                        "; its key is in s3:, or in AWS_… variables."
                        if uri.startswith("s3://")
                        else "."
                    ),
                ) from error
            logger.warning("the staging place %s can't be written now: %s", uri, said)


@contextmanager
def stored_for_a_while(storage: Storage, place: str, name: str) -> Iterator[None]:
    """A small file of that name in the place, while it lasts. Raises OSError."""
    uri = f"{place.rstrip('/')}/{name}"
    with _removed(uri, storage):
        store(storage, uri, pa.py_buffer(b"cdc_assets can write here\n"))
        yield


@contextmanager
def _removed(uri: str, storage: Storage) -> Iterator[None]:
    """Remove the file that the block writes, and the folders that came with it."""
    filesystem, path = storage.locate(uri)
    if not isinstance(filesystem, fs.LocalFileSystem):
        yield
        with suppress(OSError):  # not stored, or it can't be reached any more
            # A folder of an object store is a marker, which pyarrow leaves when it deletes a file.
            filesystem.delete_file(path)
        return
    with folders_as_they_were(Path(path)):
        yield


@contextmanager
def folders_as_they_were(probe: Path) -> Iterator[None]:
    """Remove ``probe``, which the block makes, and the folders above it that weren't there."""
    made = [folder for folder in probe.parents if not folder.exists()]
    try:
        yield
    finally:
        probe.unlink(missing_ok=True) if probe.is_file() else rmtree(probe, ignore_errors=True)
        for folder in made:
            with suppress(OSError):  # it never came to be, or has something else in it by now
                folder.rmdir()


def store(storage: Storage, uri: str, data: pa.Buffer) -> None:
    """Write one file durably; under a name that is taken, the new content wins. Raises OSError."""
    filesystem, path = storage.locate(uri)
    if isinstance(filesystem, fs.LocalFileSystem):
        _store_durably(Path(path), data)
        return
    with filesystem.open_output_stream(path) as stream:
        stream.write(data)


def _store_durably(path: Path, data: pa.Buffer) -> None:
    """Write a local file; once this returns, the whole file survives a power cut.

    Nothing reads it before that: only registered files are read.
    """
    try:
        file = path.open("wb")
    except FileNotFoundError:
        _make_durably(path.parent)
        file = path.open("wb")
    try:
        with file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        with suppress(OSError):  # the half of a file would fill a full disk even more
            path.unlink()
        raise
    _sync(path.parent)


def _make_durably(folder: Path) -> None:
    if folder.is_dir():
        return
    _make_durably(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync(folder.parent)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
