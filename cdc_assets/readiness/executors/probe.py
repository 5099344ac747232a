"""What a probe asks where it runs, and says of it.

This module runs inside Spark's Python workers.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import psycopg
import pyarrow as pa

from cdc_assets.errors import CdcError, first_line
from cdc_assets.log.staged.storage import Storage, store
from cdc_assets.postgres.session.clock import ahead_seconds
from cdc_assets.postgres.session.connect import connect

ANSWER_SCHEMA = "host string, process bigint, what string, problem string, detail string"
_TEXTS = ("what", "problem", "detail")


@dataclass(frozen=True, slots=True)
class Reach:
    """What executors have to reach: ``places`` and ``databases`` by what they are.

    ``written``: the name of a file that is in each place. ``clock``: which database's clock counts.
    """

    places: Mapping[str, str]
    storage: Storage
    written: str
    databases: Mapping[str, str]
    clock: str


def reach_of(reach: Reach) -> Callable[[Iterable[pa.RecordBatch]], Iterable[pa.RecordBatch]]:
    """For ``mapInArrow``: try all of it; a row of ANSWER_SCHEMA for each.

    ``detail``: the name of the file that was written to the place, or the seconds that the
    database's clock is ahead.
    """

    def tried(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            answers = [*_places(reach), *_databases(reach)]
            number = len(answers)
            here = {"host": [socket.gethostname()] * number, "process": [os.getppid()] * number}
            texts = {t: pa.array([a[t] for a in answers], pa.string()) for t in _TEXTS}
            yield pa.RecordBatch.from_pydict({**here, **texts})

    return tried


def _places(reach: Reach) -> Iterator[dict[str, Any]]:
    for what, uri in reach.places.items():
        problem, name = None, f"{reach.written}-{uuid.uuid4().hex}"
        try:
            filesystem, path = reach.storage.locate(f"{uri}/{reach.written}")
            with filesystem.open_input_file(path) as file:
                file.read()
            store(reach.storage, f"{uri}/{name}", pa.py_buffer(b"cdc_assets can write here\n"))
        except OSError as error:
            problem = first_line(error)
        yield {"what": what, "problem": problem, "detail": name}


def _databases(reach: Reach) -> Iterator[dict[str, Any]]:
    for what, dsn in reach.databases.items():
        problem, ahead = None, 0.0
        try:
            with connect(dsn, application_name="cdc_assets check") as connection:
                if what == reach.clock:
                    ahead = ahead_seconds(connection)
        except (CdcError, psycopg.Error) as error:
            problem = first_line(error)
        yield {"what": what, "problem": problem, "detail": str(ahead)}
