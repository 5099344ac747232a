"""Where a benchmark runs: a Postgres that is kept with its data, and a home that is not."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from cdc_assets.config.source import SourceConfig
from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.postgres.session.connect import Connection
from cdc_assets.process.home import home
from cdc_assets.process.lifeline import acquire


@contextmanager
def workplace(
    cache: Path, say: Callable[[str], None], **settings: str
) -> Iterator[EmbeddedPostgres]:
    """The kept Postgres, for one benchmark at a time, and a home that is removed afterwards.

    ``settings``: of the server, beside ours.
    """
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        say(f"using {cache}; if another run does, this one waits")
        acquire(lock, threading.Event())
        for left in cache.glob("bench-*"):  # of a run that was killed
            shutil.rmtree(left)
        with tempfile.TemporaryDirectory(prefix="bench-", dir=cache) as folder:
            os.environ["CDC_ASSETS_HOME"] = folder  # so the Spark server is nobody else's
            # With the default of 1 GB a load at scale 1 would be checkpoints all along.
            settings = {"max_wal_size": "4GB", **settings}
            with EmbeddedPostgres(cache / "postgres", settings=settings) as postgres:
                yield postgres


def fresh_database(server_dsn: str, name: str) -> str:
    """The DSN of a database that is empty, whatever an earlier run left."""
    with psycopg.connect(server_dsn, autocommit=True) as server:
        forget(server, name)
        server.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    return make_conninfo(server_dsn, dbname=name)


def forget(server: Connection, name: str) -> None:
    """Drop a database of an earlier run, its slots first."""
    server.execute(
        "select pg_terminate_backend(pid, 5000) from pg_stat_activity where datname = %s", (name,)
    )
    server.execute(
        "select pg_drop_replication_slot(slot_name) from pg_replication_slots where database = %s",
        (name,),
    )
    server.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))


def served(*configs: SourceConfig) -> Path:
    """A file for ``dagster dev -f``: the definitions of the sources, as components make them."""
    path = home() / "definitions.py"
    path.write_text(
        "import json\n"
        "import dagster as dg\n"
        "import cdc_assets.components\n"
        "from cdc_assets.config.source import parse_config\n"
        "from cdc_assets.dagster.build import process_defs\n"
        "from cdc_assets.dagster.part import serves_sources_alone\n"
        "serves_sources_alone()\n"
        f"sources = {[config.dump() for config in configs]!r}\n"
        "configs = [parse_config(json.loads(source), 'bench') for source in sources]\n"
        "defs = dg.Definitions.merge(*map(process_defs, configs))\n"
    )
    return path
