"""Two tables that many tests maintain: changes, other settings, and what is to be seen of them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from cdc_assets.maintenance.run import Maintained, maintain
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support.lake import Lake

M, P = TableId("public", "m"), TableId("public", "p")

SETUP = """
create table m (id int primary key, v text);
insert into m select i, 'v' || i from generate_series(1, 400) i;
create table p (id int primary key, part int not null, v text);
insert into p select i, i % 3, 'v' || i from generate_series(1, 300) i;
"""


def cycle(source: Lake, i: int, *tables: TableId) -> None:
    """A merge of inserts, updates and deletes."""
    source.execute(f"insert into m values ({1000 + i}, 'new') on conflict do nothing")
    source.execute(f"update m set v = 'c{i}' where id % 7 = {i % 7}")
    source.execute(f"delete from m where id % 41 = {i % 41}")
    source.execute(f"update p set part = (part + 1) % 3, v = 'c{i}' where id % 11 = {i % 11}")
    source.flush()
    for table in tables or source.tables:
        source.drain(table)


@contextmanager
def settings(source: Lake, **maintenance: Any) -> Iterator[Pipeline]:
    """The source with other maintenance settings."""
    data = json.loads(source.config.dump())
    data["maintenance"] = {"min_input_files": 2, **maintenance}
    with Pipeline.open(type(source.config).model_validate(data)) as pipeline:
        yield pipeline


def maintained(
    source: Lake, pipeline: Pipeline, *tables: TableId, **options: Any
) -> dict[TableId, Maintained]:
    done = maintain(pipeline, lambda: source.session, tables or source.tables, **options)
    found = {one.table: one for one in done}
    assert [one.problem for one in found.values()] == [None] * len(found)
    return found


def equals_the_source(source: Lake, *tables: TableId) -> None:
    for table in tables or source.tables:
        assert source.equal(table)


def main(source: Lake, table: TableId) -> tuple[int, dict[str, str]]:
    """The current snapshot: its id and its summary."""
    loaded = source.lake_table(table).load()
    current = loaded.current_snapshot() if loaded is not None else None
    assert current is not None and current.summary is not None
    return current.snapshot_id, dict(current.summary.additional_properties)


def files(source: Lake, table: TableId) -> list[Path]:
    location = source.lake_table(table).location
    assert location is not None
    return [p for p in Path(location.removeprefix("file://")).rglob("*") if p.is_file()]


def age(paths: list[Path], days: int = 10) -> None:
    then = time.time() - days * 86400
    for path in paths:
        os.utime(path, (then, then))


def no_session() -> SparkSession:
    raise AssertionError("Spark was asked for although there is nothing to do")
