"""What must live: files outside of ours, and a function at the source that nobody calls."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from cdc_assets.maintenance.run import Maintained, maintain
from cdc_assets.pipeline import Pipeline
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.support.lake import Lake, lake

SETUP = """
create table t (id int primary key, v text, a int[]);
insert into t select i, 'v' || i, array[i] from generate_series(1, 50) i;
create table secret (id int primary key, v text, a int[]);
insert into secret select i, 'canary', null from generate_series(1, 50) i;
create function canary() returns boolean language plpgsql as 'begin return false; end';
"""
# At once, and everything: what a year would bring.
GREEDY = {
    "staged_grace": "0s",
    "orphan_grace": "1d",
    "min_input_files": 2,
    "keep_snapshots": {"count": 1, "age": "0s"},
}


class Planted:
    """A source, its lake, and somebody who may write in the coordination schema, no more."""

    def __init__(self, opened: Lake, coordination: psycopg.Connection[Any], outside: Path) -> None:
        self.lake = opened
        self.outside = outside
        self._coordination = coordination

    def plant(self, statement: str, *parameters: object) -> int:
        """Run a statement as the coordination role; how many rows it met."""
        return self._coordination.execute(statement.encode(), parameters).rowcount

    def one(self, query: str) -> Any:
        row = self._coordination.execute(query.encode()).fetchone()
        assert row is not None
        return row[0]

    def maintain(self) -> Maintained:
        """As a person has it done, thoroughly."""
        pipeline = self.lake.pipeline
        [done] = maintain(pipeline, lambda: self.lake.session, self.lake.tables)
        return done

    def calls(self) -> int:
        """How often anybody called ``canary``; a session tells when it is idle, or at its end."""
        self.lake.execute("select pg_stat_force_next_flush()")
        found = "select coalesce(sum(calls), 0) from pg_stat_user_functions"
        return int(self.lake.execute(found)[0][0])

    def values(self) -> set[str]:
        """What the lake has in column v."""
        return {row[1] for row in self.lake.rows(self.lake.tables[0])}


@contextmanager
def planted(new: NewDatabase, spark_url: str, outside: Path, **settings: Any) -> Iterator[Planted]:
    """The lake ``src`` of one table; the coordination schema is in a database of its own."""
    dsn, state = new(), new()
    with psycopg.connect(dsn, autocommit=True) as source:
        name = source.info.dbname
        source.execute(f"alter database {name} set track_functions = 'pl'".encode())
    settings = {
        "state": {"postgres_url": state},
        "maintenance": GREEDY,
        "tables": [{"name": "t", "columns": {"unrepresentable": "fail"}}],
        **settings,
    }
    tables = settings.pop("tables")
    with (
        lake(dsn, spark_url, SETUP, *tables, **settings) as opened,
        psycopg.connect(state, autocommit=True) as coordination,
    ):
        coordination.execute("set search_path = _pg2iceberg")
        yield Planted(opened, coordination, outside)


def change(found: Planted, value: str) -> None:
    """A change of the source's table, staged."""
    found.lake.execute(f"update t set v = '{value}' where id % 10 = 1")
    found.lake.flush()


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, as it is."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def aged(folder: Path, days: int = 10) -> None:
    """Make everything in a folder so old."""
    then = time.time() - days * 86400
    for path in folder.rglob("*"):
        os.utime(path, (then, then))


def pipeline_with(found: Planted, **sections: Any) -> Pipeline:
    """Another pipeline of the same source, of a configuration that differs in some sections."""
    import json

    data = json.loads(found.lake.config.dump()) | sections
    return Pipeline.open(type(found.lake.config).model_validate(data))
