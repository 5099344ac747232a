"""Partitions and order of a table that exists follow the configuration."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from cdc_assets.errors import TableProblem
from cdc_assets.maintenance.compact import compact
from cdc_assets.maintenance.files import live_files
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support.lake import Lake, NewLake

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

P = TableId("public", "p")
SETUP = """
create table p (id int primary key, at timestamp not null, region text);
insert into p select i, timestamp '2026-01-01' + i * interval '12 hours', 'r' || i % 3
  from generate_series(1, 60) i;
"""


@pytest.fixture(params=[3, 2], ids="format-v{}".format)
def source(request: pytest.FixtureRequest, copied_lake: NewLake) -> Iterator[Lake]:
    settings = {"lake": {"format_version": request.param}}
    with copied_lake(SETUP, "p", **settings) as opened:
        yield opened


def configure(source: Lake, **settings: Any) -> None:
    """The configuration is edited, and whoever reads it starts anew."""
    table = source.config.table(P).model_copy(update=settings)
    source.config = source.config.model_copy(update={"tables": (table,)})
    source.pipeline.config = source.config


def fields(source: Lake) -> list[str]:
    loaded = source.lake_table(P).load()
    assert loaded is not None
    return [str(field.transform) for field in loaded.spec().fields]


def specs(source: Lake) -> set[int]:
    """The specs of the files that hold rows."""
    loaded = source.lake_table(P).load()
    current = loaded.current_snapshot() if loaded is not None else None
    assert loaded is not None
    assert current is not None
    return {file.spec_id for file in live_files(loaded, current)}


def change(source: Lake, value: int) -> None:
    """Rows of the first files and of the last ones are updated, deleted, moved and inserted."""
    source.execute(
        f"update p set region = 'u{value}' where id % 7 = {value % 7};"
        f" update p set at = at + interval '40 days' where id % 11 = {value % 11};"
        f" delete from p where id % 13 = {value % 13};"
        f" insert into p values (1000 + {value}, '2026-03-01', null);"
        f" update p set id = id + 2000 where id = 1000 + {value - 1}"
    )
    source.flush()
    source.drain(P)


def compacted(source: Lake) -> int:
    found = compact(
        source.pipeline.store,
        source.lake_table(P),
        lambda: source.session,
        until=time.monotonic() + 300,
    )
    return found.rewritten_files


def test_the_partition_spec_follows_the_configuration_beside_older_files(source: Lake) -> None:
    change(source, 1)
    assert fields(source) == []
    configure(source, partition_by=("month(at)", "truncate(1, region)"))
    change(source, 2)
    assert fields(source) == ["month", "truncate[1]"]
    configure(source, partition_by=("days(at)", "bucket(4, id)"))
    change(source, 3)
    assert fields(source) == ["day", "bucket[4]"]
    assert len(specs(source)) > 1  # of format version 2, some old files are written anew
    assert source.equal(P)
    change(source, 4)  # hits rows of files of every spec
    assert source.equal(P)
    assert [c.equal for c in source.verify()] == [True]
    # A column's new name needs no change of what was applied.
    source.execute("alter table p rename at to moment")
    source.execute("update p set region = 'renamed' where id = 5")
    source.flush()
    source.drain(P)
    assert fields(source) == ["day", "bucket[4]"]
    cursor = source.lake_table(P).state().cursor
    assert compacted(source)
    loaded = source.lake_table(P).load()
    assert loaded is not None
    assert specs(source) == {loaded.spec().spec_id}
    assert source.lake_table(P).state().cursor == cursor
    assert source.equal(P)
    before = source.snapshots(P)
    assert compacted(source) == 0  # and that is all there is to do
    assert source.snapshots(P) == before
    source.execute("delete from p where id % 5 = 0")
    source.flush()
    source.drain(P)
    assert [c.equal for c in source.verify()] == [True]
    configure(source, partition_by=())
    assert compacted(source)  # without a change of a row, too
    assert fields(source) == []
    assert source.equal(P)


def test_a_table_is_made_with_every_spelling_of_its_partitions(copied_lake: NewLake) -> None:
    """Also where Spark would want a name quoted."""
    spelt = [
        "years(a)",
        "month(b)",
        "date(c)",
        "date_hour(d)",
        "bucket(2, ümlaut)",
        "truncate(e, 1)",
    ]
    setup = (
        "create table p (ümlaut int primary key, a timestamp, b timestamp, c timestamp,"
        " d timestamp, e text, f text);"
        " insert into p values (1, now(), now(), now(), now(), 'e', 'f')"
    )
    table = {"name": "p", "partition_by": [*spelt, "f"]}
    with copied_lake(setup, table) as source:
        expected = ["year", "month", "day", "hour", "bucket[2]", "truncate[1]", "identity"]
        assert fields(source) == expected
        assert source.equal(P)


@pytest.mark.parametrize("source", [3], indirect=True)
def test_the_order_follows_the_configuration(source: Lake) -> None:
    configure(source, sort_by=("region desc", "id"))
    change(source, 1)
    loaded = source.lake_table(P).load()
    assert loaded is not None
    assert [(str(f.direction), f.source_id) for f in loaded.sort_order().fields] == [
        ("DESC", 3),
        ("ASC", 1),
    ]
    source.execute(
        "insert into p select i, '2026-05-01', 'r' || i % 5 from generate_series(70, 99) i"
    )
    source.flush()
    source.drain(P)
    name = source.lake_table(P).sql_name
    written = source.session.sql(
        f"select region, id from {name} where id between 70 and 99 order by _file, _pos"
    ).collect()
    assert [tuple(row) for row in written] == sorted(
        (tuple(row) for row in written), key=lambda row: (-ord(row[0][1]), row[1])
    )
    configure(source, sort_by=(), partition_by=("region",))
    change(source, 2)
    loaded = source.lake_table(P).load()
    assert loaded is not None
    assert loaded.sort_order().is_unsorted
    assert fields(source) == ["identity"]
    assert [c.equal for c in source.verify()] == [True]


@pytest.mark.parametrize("source", [3], indirect=True)
def test_a_layout_that_cant_be_is_named_and_nothing_is_lost(source: Lake) -> None:
    change(source, 1)
    for settings, what in (
        (
            {"partition_by": ("day(created_at)",)},
            r"column created_at.*Correct partition_by.*region",
        ),
        ({"sort_by": ("nowhere",)}, r"column nowhere.*Correct sort_by"),
        ({"partition_by": ("day(region)",)}, r"day\(`region`\).*is string.*another transform"),
    ):
        configure(source, **settings)
        source.execute("update p set region = 'waits' where id = 3")
        source.flush()
        with pytest.raises(TableProblem, match=f"(?s)public.p: .*{what}"):
            source.drain(P)
        assert fields(source) == []
        configure(source, partition_by=(), sort_by=())
    source.drain(P)
    assert source.equal(P)
