"""Tables that change shape while they are copied end as the source has them, or are parked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cdc_assets.errors import CopyRestarted, TableProblem
from cdc_assets.pins import pins
from cdc_assets.postgres.slots import NewSlot, create_slot
from cdc_assets.snapshot.coordinator import copy_table
from cdc_assets_tests.integration.snapshot.sources import T, U, chunk_keys
from cdc_assets_tests.support.lake import Lake, NewLake

pytestmark = pytest.mark.spark


LARGE = """
create table t (id int primary key, v text not null, pad text);
insert into t select i, 'old ' || i, repeat('x', 100) from generate_series(1, 20000) i;
create index t_v on t (v);
-- Room that only VACUUM FULL gives back: it moves rows into pages that were copied already.
delete from t where id % 4 = 0;
create table u as table t;
alter table u add primary key (id);
"""


@pytest.fixture
def large(new_lake: NewLake) -> Iterator[Lake]:
    with new_lake(
        LARGE,
        {"name": "t", "chunk_pages": 16},
        {"name": "u", "chunk_pages": 16},
    ) as opened:
        yield opened


@pytest.mark.parametrize(
    "events",
    [
        ["truncate t", "insert into t values (1, 'only', null)"],
        ["delete from t where id % 2 = 0", "vacuum full t"],
        ["update t set v = 'x' || id where id % 2 = 0", "cluster t using t_v"],
        [
            "drop table t",
            "create table t (id int primary key, v text not null, pad text)",
            "insert into t select i, 'another', null from generate_series(1, 500) i",
        ],
        [
            "alter table t rename to t_old",
            "create table t (v date, id bigint primary key)",
            "insert into t select '2024-01-01', i from generate_series(1, 500) i",
        ],
        ["alter table t drop column pad"],
        # The file stays, and so does the column's name.
        ["alter table t drop column pad, add column pad int not null default 5"],
        ["alter table t alter v type varchar(50), alter id type bigint"],
    ],
    ids=[
        "truncate",
        "vacuum full",
        "cluster",
        "recreated",
        "replaced by another",
        "column dropped",
        "column replaced by one of another type",
        "types changed",
    ],
)
def test_a_table_that_is_rewritten_while_it_is_copied_ends_as_the_source_has_it(
    large: Lake, events: list[str]
) -> None:
    source = large
    source.pin()
    keys = chunk_keys(source)
    copy_table(source.pipeline, source.session, T, only=keys[:2])
    for event in events:
        source.execute(event)
    try:
        copy_table(source.pipeline, source.session, T)
    except CopyRestarted:
        assert source.row(T).state == "waiting"
        source.pin()
        copy_table(source.pipeline, source.session, T)
        assert source.row(T).epoch == 2
    copy_table(source.pipeline, source.session, U)
    assert source.row(U).epoch == 1, "nothing happened to the other table"
    source.execute("update t set id = id + 100000 where id % 7 = 0")
    source.catch_up()
    assert source.equal(T)
    assert source.equal(U)


def test_a_table_that_is_dropped_while_it_is_copied_is_parked(large: Lake) -> None:
    source = large
    source.pin()
    keys = chunk_keys(source)
    copy_table(source.pipeline, source.session, T, only=keys[:2])
    source.execute("drop table t")
    with pytest.raises(TableProblem, match="not found in the source"):
        copy_table(source.pipeline, source.session, T)
    assert source.row(T).state == "parked"
    assert "not found in the source" in str(source.row(T).reason)
    copy_table(source.pipeline, source.session, U)
    source.catch_up(U)
    assert source.equal(U)


def test_a_table_that_is_rewritten_between_its_snapshot_and_its_plan_is_copied_anew(
    large: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rewritten_meanwhile(dsn: str, slot: str, *, temporary: bool) -> NewSlot:
        made = create_slot(dsn, slot, temporary=temporary)
        if not temporary:  # rows that ALTER TABLE wrote are invisible to older snapshots
            large.execute("alter table t alter id type bigint")
        return made

    monkeypatch.setattr(pins, "create_slot", rewritten_meanwhile)
    large.pin()
    with pytest.raises(CopyRestarted):
        copy_table(large.pipeline, large.session, T)
    large.pin()
    large.copy()
    large.catch_up()
    assert large.equal(T)
    assert large.equal(U)


def test_a_table_that_is_altered_while_its_pin_waits_is_described_anew(
    large: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def altered_meanwhile(dsn: str, slot: str, *, temporary: bool) -> NewSlot:
        if not temporary:  # what slot creation waits for may be a migration
            large.execute("alter table t drop column pad, alter id type bigint, add extra int")
        return create_slot(dsn, slot, temporary=temporary)

    monkeypatch.setattr(pins, "create_slot", altered_meanwhile)
    large.pins.prepare()
    assert large.row(T).state == "waiting"
    assert large.row(U).state == "copying"
    large.pin()
    large.copy()
    large.catch_up()
    assert large.equal(T)
    assert large.equal(U)
