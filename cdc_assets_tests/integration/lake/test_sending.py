"""Rows that go along with a statement arrive as they are, however many there are of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StringType, StructField, StructType

from cdc_assets.config.source import parse_config
from cdc_assets.lake.spark import sending
from cdc_assets.lake.spark.sending import repeated, sent
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.lake.spark.session import open_session
from cdc_assets_tests.conftest import NewDatabase

_ROW = pa.struct([("a.b", pa.string()), ("", pa.string()), ("a", pa.string())])


@pytest.fixture
def session(postgres_dsn: NewDatabase, spark_server: SparkServer) -> Iterator[SparkSession]:
    remote = {"remote": spark_server.ensure()}
    settings = {"postgres": {"dsn": postgres_dsn()}, "tables": [{"name": "t"}], "spark": remote}
    opened = open_session(parse_config({"name": "s", **settings}, "test"))
    yield opened
    opened.stop()


def _table(rows: int) -> pa.Table:
    texts = [{"a.b": None if n % 3 else str(n), "": "", "a": 'é"' * (n % 5)} for n in range(rows)]
    unknown = [["a"] * (n % 3) or None for n in range(rows)]
    return pa.table(
        {"row": pa.array(texts, _ROW), "unknown": pa.array(unknown, pa.list_(pa.string()))}
    )


@pytest.mark.parametrize("rows", [0, 1, 1_000])
def test_packed_rows_arrive_as_they_are(
    rows: int, session: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "_PACKED_BYTES", 2_000)
    table = _table(rows)
    arrived = sent(session, table).toArrow()
    assert arrived.column_names == table.column_names
    assert sorted(map(repr, arrived.to_pylist())) == sorted(map(repr, table.to_pylist()))


def test_few_rows_of_the_plan_hold_many(
    session: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, given, create = _table(20_000), list[int](), session.createDataFrame

    def counting(rows: pa.Table) -> DataFrame:
        given.append(len(rows))
        return create(rows)

    monkeypatch.setattr(session, "createDataFrame", counting)
    assert sent(session, table).count() == len(table)
    assert given == [-(-table.nbytes // 2**20)]


def test_few_rows_are_one_task_s_and_many_are_shared(
    session: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each task writes a file of its own, and every later merge opens all files of the table."""
    table = _table(20_000)
    monkeypatch.setattr(sending, "_PACKED_BYTES", table.nbytes // 10)

    def tasks() -> int:
        return sent(session, table).select(F.spark_partition_id()).distinct().count()

    assert tasks() == 1
    monkeypatch.setattr(sending, "_TASK_BYTES", table.nbytes // 2)
    assert tasks() == 2


def test_repeated_rows_are_sent_once_where_they_are_many(
    session: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = StructType([StructField("n", LongType()), StructField("text", StringType())])
    rows = [(n, "x" * 100) for n in range(2_000)]

    def statement(limit: int) -> int:
        """How long the statement is that joins such a frame with itself."""
        monkeypatch.setattr(sending, "_REPEATED_BYTES", limit)
        frame = repeated(session, rows, schema)
        joined = frame.alias("a").join(frame.alias("b"), "n")
        assert joined.count() == len(rows)
        query: Any = joined
        return len(query._plan.to_proto(query.sparkSession.client).SerializeToString())

    before = session.conf.get("spark.sql.session.localRelationCacheThreshold")
    assert statement(10**9) > 2 * 200_000
    assert statement(100_000) < 10_000
    assert session.conf.get("spark.sql.session.localRelationCacheThreshold") == before
