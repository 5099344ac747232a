"""A lost pin in the modes that keep history: what is copied is as of one moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdc_assets.errors import CopyRestarted
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.log.copies.chunks import chunks
from cdc_assets.log.tables import TableRow
from cdc_assets.pins.pins import Pins
from cdc_assets.postgres.names import TableId
from cdc_assets.snapshot.coordinator import copy_table
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.flusher_support import flushing, wait_for
from cdc_assets_tests.lake_support import Lake, lake

pytestmark = pytest.mark.spark

EVENTS, MARKED = (TableId("public", name) for name in ("events", "marked"))
SETUP = "".join(
    f"create table {table.name} (id int primary key, v text);"
    f"insert into {table.name} select i, repeat('x', 100) from generate_series(1, 300) i;"
    for table in (EVENTS, MARKED)
)


@pytest.fixture
def source(postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path) -> Iterator[Lake]:
    with lake(
        postgres_dsn(),
        spark_server.ensure(),
        SETUP,
        {"name": "events", "mode": "append", "chunk_pages": 1},
        {"name": "marked", "mode": "soft_delete", "chunk_pages": 1},
    ) as opened:
        yield opened


def _row(source: Lake, table: TableId) -> TableRow:
    row = source.pipeline.store.table(table)
    assert row is not None
    return row


def test_history_is_copied_anew(source: Lake) -> None:
    source.pin()
    first = _row(source, EVENTS).snapshot_lsn
    assert first is not None
    for table in source.tables:
        keys = [chunk.key for chunk in chunks(source.pipeline.store, table, 1)]
        copy_table(source.pipeline, source.session, table, only=keys[:1])
        # Of pages that weren't read: one row comes, one goes, one changes.
        source.execute(
            f"insert into {table} values (1000, 'new'); delete from {table} where id = 300;"
            f"update {table} set v = 'changed' where id = 299"
        )
    source.pins.close()  # the pin is lost
    source.pins = Pins(source.pipeline)
    source.pin()
    source.pin()
    source.copy()
    source.execute("delete from events where id = 1; delete from marked where id = 1")
    source.flush()
    source.drain_all()

    rows = source.session.table(source.lake_table(EVENTS).sql_name).collect()
    copied = [*range(1, 300), 1000]
    assert Counter((row["id"], row["_op"]) for row in rows) == Counter(
        [*((number, "I") for number in copied), (1, "D")]
    )
    rows = source.session.table(source.lake_table(MARKED).sql_name).collect()
    assert sorted(row["id"] for row in rows) == copied
    # History begins with the copy, and the copy is whole as of there.
    for table in source.tables:
        begins = _row(source, table).snapshot_lsn
        assert begins is not None
        assert begins > first


def test_history_does_not_begin_with_rows_that_nobody_copied(source: Lake) -> None:
    """A truncate stands for the rows of a mirror's copy, and not for those of a history."""
    source.pin()
    keys = [chunk.key for chunk in chunks(source.pipeline.store, EVENTS, 1)]
    copy_table(source.pipeline, source.session, EVENTS, only=keys[:1])
    with flushing(source.config):
        source.execute("truncate events; insert into events values (7, 'after')")
        with pytest.raises(CopyRestarted):
            copy_table(source.pipeline, source.session, EVENTS)
        wait_for(lambda: _row(source, EVENTS).state == "copying")
        copy_table(source.pipeline, source.session, EVENTS)
    source.flush()
    source.drain(EVENTS)
    rows = source.session.table(source.lake_table(EVENTS).sql_name).collect()
    assert [(row["id"], row["_op"]) for row in rows] == [(7, "I")]
