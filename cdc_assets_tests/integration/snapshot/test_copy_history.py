"""A lost pin in the modes that keep history: what is copied is as of one moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from cdc_assets.errors import CopyRestarted
from cdc_assets.pins.pins import Pins
from cdc_assets.postgres.names import TableId
from cdc_assets.snapshot.coordinator import copy_table
from cdc_assets_tests.integration.snapshot.sources import chunk_keys
from cdc_assets_tests.support.flusher import flushing
from cdc_assets_tests.support.lake import Lake, NewLake
from cdc_assets_tests.support.waiting import wait_for

pytestmark = pytest.mark.spark

EVENTS, MARKED = (TableId("public", name) for name in ("events", "marked"))
SETUP = "".join(
    f"create table {table.name} (id int primary key, v text);"
    f"insert into {table.name} select i, repeat('x', 100) from generate_series(1, 300) i;"
    for table in (EVENTS, MARKED)
)


@pytest.fixture
def source(new_lake: NewLake) -> Iterator[Lake]:
    with new_lake(
        SETUP,
        {"name": "events", "mode": "append", "chunk_pages": 1},
        {"name": "marked", "mode": "soft_delete", "chunk_pages": 1},
    ) as opened:
        yield opened


def test_history_is_copied_anew(source: Lake) -> None:
    source.pin()
    first = source.row(EVENTS).snapshot_lsn
    assert first is not None
    for table in source.tables:
        keys = chunk_keys(source, table)
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
    source.catch_up()

    rows = source.session.table(source.lake_table(EVENTS).sql_name).collect()
    copied = [*range(1, 300), 1000]
    assert Counter((row["id"], row["_op"]) for row in rows) == Counter(
        [*((number, "I") for number in copied), (1, "D")]
    )
    rows = source.session.table(source.lake_table(MARKED).sql_name).collect()
    assert sorted(row["id"] for row in rows) == copied
    # History begins with the copy, and the copy is whole as of there.
    for table in source.tables:
        begins = source.row(table).snapshot_lsn
        assert begins is not None
        assert begins > first


def test_history_does_not_begin_with_rows_that_nobody_copied(source: Lake) -> None:
    """A truncate stands for the rows of a mirror's copy, and not for those of a history."""
    source.pin()
    keys = chunk_keys(source, EVENTS)
    copy_table(source.pipeline, source.session, EVENTS, only=keys[:1])
    with flushing(source.config):
        source.execute("truncate events; insert into events values (7, 'after')")
        with pytest.raises(CopyRestarted):
            copy_table(source.pipeline, source.session, EVENTS)
        wait_for(lambda: source.row(EVENTS).state == "copying")
        copy_table(source.pipeline, source.session, EVENTS)
    source.flush()
    source.drain(EVENTS)
    rows = source.session.table(source.lake_table(EVENTS).sql_name).collect()
    assert [(row["id"], row["_op"]) for row in rows] == [(7, "I")]
