"""Findings about Spark's executors: their Python first, then what they reach.

A probe is a job with a task for each slot; each task waits a little, so that no executor is passed
over while another one is quick. One that is busy with other jobs meanwhile may be.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple
from weakref import WeakSet

import pyarrow as pa
from pyspark.sql import Row, SparkSession
from sqlalchemy import create_engine, inspect
from sqlalchemy.exc import OperationalError

from cdc_assets.config.addresses import coordination_dsn, copy_dsn, source_dsn
from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import CdcError, first_line
from cdc_assets.lake.catalog.catalog import CATALOG, sql_catalog_uri
from cdc_assets.lake.catalog.place import TABLES
from cdc_assets.log.staged.storage import Storage, stored_for_a_while
from cdc_assets.messages.findings import Finding
from cdc_assets.readiness.executors.probe import ANSWER_SCHEMA, Reach, reach_of
from cdc_assets.readiness.flushing import refuse

# What tasks and this process hand each other, or make of the same values: it has to be the same.
PACKAGES = ("cdc-assets", "pyspark", "pyarrow", "numpy", "numba", "psycopg", "pyiceberg")
# Clocks of executors sign requests, which object stores refuse after 15 minutes.
SKEW_SECONDS = 5.0
_WAIT_SECONDS = 0.5
# Rows for the tasks of a probe: Spark makes a task for each slot of them.
_MANY = 4096
_SOURCE, _COORDINATION, _COPY = "source", "coordination database", "server that copies read"
_STAGING, _WAREHOUSE = "staging place", "warehouse"


class _Unreached(NamedTuple):
    """What is said of a thing that an executor doesn't reach."""

    code: str
    remedy: str


_UNREACHED = {
    _SOURCE: _Unreached(
        "executor_source",
        "Write an address in postgres.dsn that means the same server everywhere, and let each"
        " machine of Spark's connect to it.",
    ),
    _COORDINATION: _Unreached(
        "executor_coordination",
        "Write an address in state.postgres_url (or postgres.dsn) that means the same server"
        " everywhere, and let each machine of Spark's connect to it.",
    ),
    _COPY: _Unreached(
        "executor_source",
        "Write an address in snapshot.from.dsn that means the same server everywhere, and let each"
        " machine of Spark's connect to it.",
    ),
    _STAGING: _Unreached(
        "executor_staging",
        "Set staging.uri to s3://…, or to a folder that every machine has; its key to s3:, or give"
        " every machine one.",
    ),
    _WAREHOUSE: _Unreached(
        "executor_warehouse",
        "Set lake.catalog.warehouse to s3://…, or to a folder that every machine has; its key to"
        " s3:, or give every machine one.",
    ),
}
_INSTALL = (
    "Give every executor the same packages: make an archive of this machine's by python -m"
    " cdc_assets.lake.spark.python_archive, name it in spark.archives and its Python in"
    " spark.sql.execution.pyspark.python, and restart the Connect server."
)
# What Spark quotes of a Python that didn't start, or wasn't fit; no value of a row is in it.
_PYTHONS_WORDS = re.compile(
    r"Error from python worker:\s+(?P<start>[^\n]+)|(?P<version>\[PYTHON_VERSION_MISMATCH\][^\n]+)"
    r"|(?P<program>Cannot run program [^\n]+)|(?P<module>ModuleNotFoundError: [^\n]+)"
)

_fit: WeakSet[SparkSession] = WeakSet()


def refuse_unfit(session: SparkSession, config: SourceConfig) -> None:
    """Raise NotReady unless the executors of a server of the user's own have our packages.

    A session is asked once.
    """
    if config.spark.remote is not None and session not in _fit:
        refuse(python_findings(session))
        _fit.add(session)


def python_findings(session: SparkSession) -> Iterator[Finding]:
    """Where the Python of an executor isn't what tasks need."""
    versions = _teller()
    wanted = versions()
    names = tuple(wanted)

    def told(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            time.sleep(_WAIT_SECONDS)
            here = {"host": [socket.gethostname()], "process": [os.getppid()]}
            there = versions()
            yield pa.RecordBatch.from_pydict({**here, **{name: [there[name]] for name in names}})

    schema = ", ".join(["host string", "process bigint", *(f"`{name}` string" for name in names)])
    try:
        rows = session.range(_MANY).mapInArrow(told, schema).collect()
    except Exception as error:  # noqa: BLE001 - Spark's, the JVM's or Python's in a task
        said = f"Spark's tasks can't run Python with cdc-assets {wanted['cdc-assets']}"
        yield Finding("spark_python", "error", f"{said}: {_pythons_words(error)}", _INSTALL)
        return
    for row in {(row.host, row.process): row for row in rows}.values():
        apart = [f"{n} {row[n]} instead of {wanted[n]}" for n in names if row[n] != wanted[n]]
        if apart:
            said = f"the executor on {row.host} (process {row.process}) has {', '.join(apart)}."
            yield Finding("spark_python", "error", said, _INSTALL)


def _teller() -> Callable[[], dict[str, str]]:
    """What tells the versions of where it is called, by the standard library alone.

    It is a function within one, and so goes to a task as a whole: our package may not be there.
    """

    def versions() -> dict[str, str]:
        found = {"python": "{}.{}".format(*sys.version_info)}
        for name in PACKAGES:
            try:
                found[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                found[name] = "none"
        # Two builds may have one version. In defs/ are the user's own sources.
        code, spec = hashlib.sha256(), importlib.util.find_spec("cdc_assets")
        for place in (spec.submodule_search_locations or ()) if spec is not None else ():
            for file in sorted(pathlib.Path(place).rglob("*.py")):
                name = file.relative_to(place).as_posix()
                if not name.startswith("defs/"):
                    code.update(name.encode() + file.read_bytes())
        found["cdc-assets"] += f" ({code.hexdigest()[:8]})"
        return found

    return versions


def _pythons_words(error: Exception) -> str:
    """What the Python there said, and where, if Spark quotes it."""
    found = _PYTHONS_WORDS.search(str(error))
    if found is None:
        return first_line(error)
    where = re.search(r"\((?P<host>\S+) executor (?P<id>\w+)\)", str(error))
    said = next(filter(None, found.groups())).strip()
    return f"{said} (on {where['host']}, executor {where['id']})" if where else said


def reach_findings(session: SparkSession, config: SourceConfig) -> Iterator[Finding]:
    """What an executor doesn't reach, and whether the server reaches the catalog.

    The executors' Python has been looked at.
    """
    try:
        if _has_catalog(config):
            session.sql(f"show namespaces in {CATALOG}").collect()
    except Exception as error:  # noqa: BLE001 - Spark's, the JVM's or the catalog's
        yield Finding(
            "spark_catalog",
            "error",
            f"the Spark Connect server can't ask the catalog: {first_line(error)}",
            "Write an address in lake.catalog.uri (or of the coordination database) that means the"
            " same server there, and let that machine connect to it.",
        )
    with suppress(CdcError, OSError), _written(config) as reach:  # of this process: told by others
        yield from _reached(session, reach)


def _has_catalog(config: SourceConfig) -> bool:
    """Whether the catalog can be asked: a SQL catalog's tables come with the first lake table."""
    if config.lake.catalog.type != "sql":
        return True
    engine = create_engine(sql_catalog_uri(config))
    try:
        return inspect(engine).has_table(TABLES[0])
    except OperationalError:  # it is away, which other checks tell
        return False
    finally:
        engine.dispose()


@contextmanager
def _written(config: SourceConfig) -> Iterator[Reach]:
    """What is to be reached, with a file of ours in each place; the executors' are removed, too."""
    places = {_STAGING: f"{config.staging_uri}/{config.log_name}"}
    if config.lake.catalog.type == "sql" and "://" in config.warehouse:  # else its catalog lends
        places[_WAREHOUSE] = config.warehouse.rstrip("/")
    databases = {_SOURCE: source_dsn(config), _COORDINATION: coordination_dsn(config)}
    if config.snapshot.from_ is not None and config.snapshot.from_.dsn is not None:
        databases[_COPY] = copy_dsn(config)
    storage, name = Storage.of(config.s3), f".probe-{uuid.uuid4().hex}"
    reach = Reach(places, storage, name, databases, _COORDINATION)
    with ExitStack() as cleanup:
        for uri in places.values():
            cleanup.enter_context(stored_for_a_while(storage, uri, name))
        yield reach


def _reached(session: SparkSession, reach: Reach) -> Iterator[Finding]:
    try:
        rows = session.range(_MANY).mapInArrow(reach_of(reach), ANSWER_SCHEMA).collect()
    except Exception as error:  # noqa: BLE001 - Spark's, the JVM's or Python's in a task
        said = f"Spark's tasks can't be asked what they reach: {_pythons_words(error)}"
        yield Finding("spark_python", "error", said, _INSTALL)
        return
    problems = dict[tuple[str, int, str], tuple[Row, str | None]]()
    for row in rows:  # each task of an executor has written files of its own
        problem = row.problem
        if problem is None and row.what in reach.places:
            problem = _not_here(reach, f"{reach.places[row.what]}/{row.detail}")
        about = (row.host, row.process, row.what)
        if problem is not None or about not in problems:
            problems[about] = row, problem
    for row, problem in problems.values():
        who = f"the executor on {row.host} (process {row.process})"
        if problem is not None:
            said = f"{who} doesn't reach the {row.what}: {problem}"
            unreached = _UNREACHED[row.what]
            yield Finding(unreached.code, "error", said, unreached.remedy)
        elif row.what == reach.clock and abs(ahead := float(row.detail)) > SKEW_SECONDS:
            yield Finding(
                "executor_clock",
                "warning",
                f"the clock of {who} is {abs(ahead):.0f} s off the {row.what}'s: object stores"
                " refuse what is signed 15 minutes apart.",
                "Have all machines synchronize their clocks (chrony, NTP).",
            )


def _not_here(reach: Reach, uri: str) -> str | None:
    """Why a file that an executor wrote isn't found here."""
    filesystem, path = reach.storage.locate(uri)
    try:
        with filesystem.open_input_file(path) as file:
            file.read()
    except OSError as error:
        return f"what it wrote isn't found here: {first_line(error)}"
    with suppress(OSError):
        filesystem.delete_file(path)
    return None
