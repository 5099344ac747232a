"""The copy: pinned, resumed, landed once (invariants 4, 5, 6, 10)."""

from __future__ import annotations

from contextlib import closing

import pytest

from cdc_assets.errors import SnapshotLost, TableProblem
from cdc_assets.log.table_row import TableRow
from cdc_assets.pins.holders import join_pin
from cdc_assets.pins.pins import Pins
from cdc_assets.postgres.names import TableId
from cdc_assets.snapshot.coordinator import copy_table
from cdc_assets.snapshot.progress import CopyProgress
from cdc_assets_tests.integration.snapshot.sources import WIDE, T, chunk_keys
from cdc_assets_tests.support.lake import Lake, NewLake

pytestmark = pytest.mark.spark


def test_invariant_5_the_copy_shows_the_moment_of_the_pin(source: Lake) -> None:
    source.pin()
    source.execute("update t set v = 'new' where id % 3 = 0")
    source.execute("delete from t where id % 5 = 0")
    source.execute("insert into t select i, 'late', '' from generate_series(30001, 31000) i")
    source.copy()
    rows = source.rows(T)
    assert len(rows) == 20000
    assert all(row[1].startswith("old ") for row in rows)


def test_invariant_4_copy_and_log_neither_overlap_nor_leave_a_gap(source: Lake) -> None:
    source.pin()
    source.execute("update t set v = 'new' where id % 3 = 0")
    source.execute("delete from t where id % 5 = 0")
    source.flush()
    source.copy()
    source.execute("insert into t select i, 'late', '' from generate_series(30001, 30100) i")
    source.catch_up()
    assert source.equal(T)


def test_invariant_6_a_killed_run_goes_on_and_no_chunk_lands_twice(source: Lake) -> None:
    source.pin()

    class Killed(BaseException):
        pass

    def die(progress: CopyProgress) -> None:
        raise Killed

    keys = chunk_keys(source)
    with pytest.raises(Killed):
        copy_table(source.pipeline, source.session, T, only=keys[:20], on_progress=die)
    landed_before = source.lake_table(T).state().landed
    assert 0 < len(landed_before) < len(keys)
    # Even without the cache: what landed is what the Iceberg table says.
    source.execute("update _pg2iceberg.snapshot_progress set state = 'planned', rows = null")
    seen: list[CopyProgress] = []
    copy_table(source.pipeline, source.session, T, on_progress=seen.append)
    again = {chunk.key for progress in seen for chunk in progress.landed}
    assert not again & landed_before
    assert source.equal(T)


def test_a_finished_copy_is_left_alone(source: Lake) -> None:
    source.pin()
    source.copy()
    before = source.snapshots(T)
    source.pin()
    source.copy()
    assert source.snapshots(T) == before


def test_invariant_10_a_table_with_a_chunk_missing_is_not_complete(source: Lake) -> None:
    source.pin()
    keys = chunk_keys(source)
    copy_table(source.pipeline, source.session, T, only=keys[:-1])
    row = source.row(T)
    assert row.state == "copying"
    copy_table(source.pipeline, source.session, T, only=keys[-1:])
    row = source.row(T)
    assert row.state == "streaming"


def test_a_pin_outlives_the_process_that_made_it_while_somebody_holds_it(source: Lake) -> None:
    source.pin()
    row = source.row(T)
    assert row.pin is not None
    with closing(join_pin(source.pipeline.store, source.pipeline.source_dsn, row.pin)):
        source.pins.close()  # the flusher dies
        successor = Pins(source.pipeline)
        successor.prepare()
        successor.tick()
    kept = source.row(T)
    assert (kept.epoch, kept.pin) == (row.epoch, row.pin)
    source.copy()
    successor.close()
    assert len(source.rows(T)) == 20000


def lose_the_pin(source: Lake) -> None:
    """Copy three chunks, let go of the snapshot, and see that nobody can go on."""
    source.pin()
    keys = chunk_keys(source)
    copy_table(source.pipeline, source.session, T, only=keys[:3])
    source.pins.close()
    with pytest.raises(SnapshotLost):
        copy_table(source.pipeline, source.session, T)
    source.execute("delete from t where id <= 100")
    source.execute("update t set v = 'between' where id between 101 and 200 or id > 19900")


def pin_again(source: Lake) -> TableRow:
    source.pins = Pins(source.pipeline)
    source.pin()
    row = source.row(T)
    assert row.state == "copying"
    return row


def test_the_rest_of_a_table_whose_pin_was_lost_is_read_under_another(source: Lake) -> None:
    lose_the_pin(source)
    landed = source.lake_table(T).state().landed
    before = source.pipeline.store.table(T)
    row = pin_again(source)
    assert before is not None
    assert (row.epoch, row.snapshot_lsn) == (1, before.snapshot_lsn)
    assert row.pin != before.pin
    source.copy()
    assert landed < source.lake_table(T).state().landed
    done = source.row(T)
    assert done.snapshot_lsn is not None
    assert done.complete_lsn is not None
    assert done.complete_lsn > done.snapshot_lsn
    source.catch_up()
    assert source.equal(T)


def test_a_table_without_a_key_begins_anew_when_its_pin_is_lost(new_lake: NewLake) -> None:
    setup = WIDE.replace("int primary key", "int") + "alter table t replica identity full;"
    with new_lake(setup, {"name": "t", "chunk_pages": 4}) as source:
        lose_the_pin(source)
        assert pin_again(source).epoch == 2
        source.copy()
        source.catch_up()
        assert source.equal(T)


def test_a_table_that_is_not_there_is_parked_and_the_others_go_on(new_lake: NewLake) -> None:
    with new_lake(WIDE, "t", "nowhere") as opened:
        opened.pin()
        copy_table(opened.pipeline, opened.session, T)
        assert len(opened.rows(T)) == 20000
        with pytest.raises(TableProblem, match=r"public\.nowhere: .*not found in the source"):
            copy_table(opened.pipeline, opened.session, TableId("public", "nowhere"))
        opened.execute("create table nowhere (id int primary key)")
        opened.pin()
        copy_table(opened.pipeline, opened.session, TableId("public", "nowhere"))
