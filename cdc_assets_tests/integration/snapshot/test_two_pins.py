"""A copy under two pins: rows that moved in between are read again (invariant 8)."""

from __future__ import annotations

import psycopg
import pytest

from cdc_assets.observe.status import collect
from cdc_assets.pins.pins import Pins
from cdc_assets.snapshot.coordinator import copy_table
from cdc_assets_tests.integration.snapshot.sources import T, chunk_keys
from cdc_assets_tests.support.lake import Lake

pytestmark = pytest.mark.spark


def test_invariant_8_a_row_that_moved_between_two_pins_keeps_its_toast(source: Lake) -> None:
    """It moved from a chunk that wasn't copied into one that was, and its update left TOAST out."""
    source.execute("truncate t; alter table t alter pad set storage external")
    source.execute(
        "insert into t select i, 'old ' || i,"
        " repeat('x', case when i between 10000 and 10010 then 9000 else 100 end)"
        " from generate_series(1, 20000) i"
    )
    source.execute("delete from t where id <= 600")
    source.execute("vacuum (index_cleanup on) t")  # the first pages have room now
    source.pin()
    keys = chunk_keys(source)
    copy_table(source.pipeline, source.session, T, only=keys[:3])
    with psycopg.connect(source.pipeline.source_dsn, autocommit=True) as writer:
        # Too long for its own full page; a session that has written nowhere yet takes the first
        # page that has room.
        writer.execute("update t set v = repeat('m', 300) where id between 10000 and 10010")
    moved = source.execute("select count(*) from t where id > 9999 and ctid < '(12,0)'")
    assert moved[0][0] > 0, "the test needs rows that moved into the copied pages"
    source.pins.close()
    source.pins = Pins(source.pipeline)
    source.pin()
    source.copy()
    assert collect(source.pipeline).tables[0].applied_lsn is None, "not whole yet (invariant 10)"
    source.flush()
    drained = source.drain(T)
    assert drained.repaired > 0
    # What was read anew is of a moment that the log comes to.
    assert collect(source.pipeline).tables[0].applied_lsn is None
    source.flush()
    source.drain(T)
    assert collect(source.pipeline).tables[0].applied_lsn is not None
    assert source.equal(T)


def _copied_under_two_pins(source: Lake, between: str) -> None:
    """Few chunks, then the statements ``between`` in a transaction each, then the others."""
    source.execute("truncate t; alter table t alter pad set storage external")
    source.execute(
        "insert into t select i, 'old ' || i, repeat(i || ' ', 2000)"
        " from generate_series(1, 2000) i"
    )
    source.pin()
    first, *_ = chunk_keys(source)
    copy_table(source.pipeline, source.session, T, only=[first])
    source.execute(between)
    source.pins.close()
    source.pins = Pins(source.pipeline)
    source.pin()
    source.copy()


@pytest.mark.parametrize("folded", ["here", "by Spark"], indirect=True)
@pytest.mark.usefixtures("folded")
def test_invariant_8_a_key_that_went_to_another_row_between_two_pins(source: Lake) -> None:
    """The rows under the old keys are of after the second pin: not those that the keys had."""
    _copied_under_two_pins(
        source,
        "begin; update t set id = -1 where id = 1000; update t set id = 1000 where id = 1001;"
        " update t set id = 1001 where id = -1; commit;"
        " update t set id = 5000 where id = 1002; insert into t values (1002, 'new', 'short')",
    )
    source.flush()
    assert source.drain(T).repaired == 3
    source.flush()
    source.drain(T)
    assert source.equal(T)
    assert [c.equal for c in source.verify()] == [True]


SWAP = """
begin; update t set id = -1 where id = 1000; update t set id = 1000 where id = 1001;
update t set id = 1001 where id = -1; commit
"""


@pytest.mark.parametrize("folded", ["here", "by Spark"], indirect=True)
@pytest.mark.usefixtures("folded")
def test_invariant_8_keys_that_were_exchanged_before_the_second_pin_and_back_after_it(
    source: Lake,
) -> None:
    """Under its key, which is its own again, the lake has the other row."""
    _copied_under_two_pins(source, SWAP)
    source.execute(SWAP)
    source.flush()
    assert source.drain(T).repaired == 2
    source.flush()
    source.drain(T)
    assert source.equal(T)


@pytest.mark.parametrize("folded", ["here", "by Spark"], indirect=True)
@pytest.mark.usefixtures("folded")
def test_invariant_8_a_row_that_was_read_anew_and_got_another_key_since(source: Lake) -> None:
    """What was read under the key was of after that, and isn't the row that moved on."""
    _copied_under_two_pins(source, "update t set id = 5000 where id = 1000")
    source.flush()
    source.execute("update t set id = 6000 where id = 5000")
    source.execute("insert into t values (5000, 'new', repeat('new ', 2000))")
    assert source.drain(T).repaired == 1
    source.flush()
    assert source.drain(T).repaired == 1
    source.flush()
    source.execute("update t set id = 7000 where id = 6000")
    source.flush()
    assert source.drain(T).repaired == 0, "the log is where rows were read at: the lake is right"
    assert source.equal(T)
