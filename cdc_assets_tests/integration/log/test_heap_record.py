"""What happens to a table and is in no stream is noticed; what only looks like it isn't."""

from __future__ import annotations

import psycopg
import pytest

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.pins.heap_facts import look_at_heaps
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.slots import current_lsn
from cdc_assets.readiness.source.now import followed
from cdc_assets_tests.support.flusher import Bench

PARTITIONED = (
    *("truncated", "dropped", "detached", "again", "attached", "moved"),
    *("unlogged", "emptied", "history", "fine", "copied", "lost"),
)
PLAIN = ("plain", "joined")
NAMES = [f"public.{name}" for name in (*PARTITIONED, *PLAIN)]


@pytest.fixture
def source(source: Bench) -> Bench:
    for name in PARTITIONED:
        source.execute(
            f"create table {name} (id int primary key, v int) partition by range (id);"
            f"create table {name}_1 partition of {name} for values from (0) to (10);"
            f"create table {name}_2 partition of {name} for values from (10) to (20);"
            f"create table {name}_9 partition of {name} for values from (90) to (99);"
            f"insert into {name} values (1), (11)"
        )
    for name in PLAIN:
        source.execute(f"create table {name} (id int primary key, v int)")
        source.execute(f"insert into {name} values (1)")
    return source


def configured(source: Bench) -> SourceConfig:
    settings = source.settings()
    tables = [{"name": name} for name in NAMES]
    tables[NAMES.index("public.history")]["mode"] = "append"
    return parse_config({**settings, "tables": tables}, "test")


def codes(source: Bench) -> dict[str, str]:
    return {
        table.removeprefix("public."): reason.split(":")[0]
        for table, reason in source.parked().items()
    }


# What a table's own name says, and what everybody does to a table that goes on.
HARM = """
truncate truncated_2
drop table dropped_1
alter table detached detach partition detached_1
alter table again detach partition again_1; delete from again_1
alter table again attach partition again_1 for values from (0) to (10)
create table attached_3 (like attached including all); insert into attached_3 values (21)
alter table attached attach partition attached_3 for values from (20) to (30)
drop table history_1
create unlogged table lost_3 partition of lost for values from (20) to (30)
delete from joined; alter table attached attach partition joined for values from (50) to (60)
alter table unlogged_1 set unlogged; insert into unlogged values (2)
alter table unlogged_1 set logged
delete from emptied
vacuum full emptied_1, emptied_2, emptied_9
vacuum full fine_1
cluster fine_2 using fine_2_pkey
create table fine_3 partition of fine for values from (20) to (30)
create table fine_4 (like fine including all)
alter table fine attach partition fine_4 for values from (30) to (40)
insert into fine values (21), (31)
alter table copied alter v type bigint, add w uuid default gen_random_uuid()
grant select on copied_1 to public
vacuum full plain
""".strip().splitlines()
# In one transaction a partition is made, filled and attached, as tools do that move rows there.
MOVED = """
create table moved_3 (like moved including all); insert into moved_3 values (21);
alter table moved attach partition moved_3 for values from (20) to (30)
"""
# … and here, afterwards.
MADE = """
create table plain_5 (like fine including all);
alter table fine attach partition plain_5 for values from (40) to (50);
insert into fine values (41)
"""


def test_what_no_stream_tells_parks_its_table_and_nothing_else_does(source: Bench) -> None:
    config = configured(source)
    source.flush(config)
    source.execute("insert into fine values (2)")
    source.flush(config)
    source.ask_log(
        "update _pg2iceberg.heap_files set files = (select json_object_agg(key, value -> 0)"
        " from json_each(files)) returning 1"
    )  # as an earlier version left it
    source.flush(config)
    assert source.parked() == {}
    for line in HARM:
        for statement in line.split(";"):
            source.execute(statement)
    for together in (MOVED, MADE):
        with source.connection.transaction():
            source.execute(together)
    source.flush(config)  # those that the log can't tell of are known at once
    early = codes(source)
    assert early == {
        "dropped": "partition_left",
        "detached": "partition_left",
        "again": "partition_left",
        "attached": "partition_attached",
        "moved": "partition_attached",
        "lost": "table_unlogged",
        "joined": "table_under_root",
    } | {name: code for name, code in early.items() if code == "rows_replaced"}
    source.flush(config)  # … the others once the log is where the source was
    assert codes(source) == early | {
        "truncated": "rows_replaced",
        "unlogged": "rows_replaced",
    }
    assert "cdc-assets resync public.truncated" in source.parked()["public.truncated"]
    # A TRUNCATE of the whole is in the stream, and a table that is empty is simply copied again.
    source.execute(
        "truncate fine, plain; insert into fine values (3); insert into plain values (3)"
    )
    source.execute("insert into emptied values (3)")
    for _ in range(2):
        source.flush(config)
    going_on = ("fine", "copied", "history", "plain")
    states = dict(source.ask_log("select table_name, state from _pg2iceberg.tables"))
    assert {states[f"public.{name}"] for name in going_on} == {"streaming"}
    assert "emptied" not in codes(source)
    assert source.log("public.fine")[-1].data["id"] == "3"
    source.resync(config, "public.truncated")
    assert "truncated" not in codes(source)
    states = dict(source.ask_log("select table_name, state from _pg2iceberg.tables"))
    assert {states[f"public.{name}"] for name in (*going_on, "emptied")} == {"streaming"}


@pytest.mark.parametrize("postgres_version", [15])
def test_a_locked_heap_is_looked_at_later(source: Bench) -> None:
    config = source.config("public.truncated", "public.copied")
    source.flush(config)

    def look() -> dict[str, str]:
        """Twice: a change is judged once the log is where the source was when it was seen."""
        with Pipeline.open(config) as pipeline, pipeline.connect_source("look") as asking:
            asking.execute("set lock_timeout = '100ms'")
            for _ in range(2):
                look_at_heaps(asking, pipeline.store, followed(pipeline.store))
                pipeline.store.advance(current_lsn(source.connection))
        return codes(source)

    with psycopg.connect(source.dsn) as session:
        source.execute("truncate copied_2")
        source.execute("vacuum full truncated_1")
        source.execute("truncate truncated_2")
        session.execute("lock table copied_1, copied_2 in access exclusive mode")
        assert look() == {"truncated": "rows_replaced"}
    assert look() == {"truncated": "rows_replaced", "copied": "rows_replaced"}
