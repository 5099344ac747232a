"""Rows are read again while a table goes on: the lake ends with the source's, whatever happens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cdc_assets.backfill.carry_out import carry_out
from cdc_assets.backfill.request import request
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.log.backfills import Backfill
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.support.lake import Lake, copied

pytestmark = pytest.mark.spark

SETUP = """
create table t (id int primary key, v text, big text);
alter table t alter big set storage external;
insert into t select i, 'v' || i, repeat('long ', 500) || i from generate_series(1, 300) i;
"""
T = TableId("public", "t")


@pytest.fixture(scope="module")
def spark_url(spark_server: SparkServer) -> str:
    return spark_server.ensure()


@pytest.fixture
def source(postgres_dsn: NewDatabase, spark_url: str, tmp_home: Path) -> Iterator[Lake]:
    with copied(postgres_dsn(), spark_url, SETUP, "t") as opened:
        yield opened


def damage(source: Lake, *statements: str) -> None:
    for statement in statements:
        source.session.sql(statement)


def backfilled(source: Lake, table: TableId = T, where: str | None = None, **how: Any) -> Backfill:
    def flush_to(lsn: object, *, seconds: float | None = None) -> None:
        source.flush()

    number = request(source.pipeline, table, where, **how).number
    return carry_out(source.pipeline, source.session, number, flush_to, print)


def test_damaged_rows_are_healed_and_surplus_ones_stay_without_replace(source: Lake) -> None:
    source.flush()
    damage(
        source,
        "update lake.src.t set v = 'wrong' where id in (3, 4)",
        "delete from lake.src.t where id between 5 and 50",
        "insert into lake.src.t select 1000, 'only here', ''",
    )
    done = backfilled(source)
    assert (done.state, done.read, done.applied, done.superseded) == ("done", 300, 300, 0)
    assert len(source.rows(T)) == 301
    done = backfilled(source, replaces=True)
    assert (done.state, done.removed) == ("done", 1)
    assert source.equal(T)
