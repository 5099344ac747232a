"""Markers: rows of a published table make marks at the commits of their transactions."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from cdc_assets.errors import ConfigurationError
from cdc_assets.log.asked import marks as log
from cdc_assets.log.asked.markers import refused_markers
from cdc_assets.log.asked.marks import MarkState
from cdc_assets.marks.make import mark
from cdc_assets.materializer.workers.follower import Follower, Listener
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support.flusher import flushing
from cdc_assets_tests.support.lake import Lake, NewLake
from cdc_assets_tests.support.threads import beside
from cdc_assets_tests.support.waiting import wait_for

pytestmark = pytest.mark.spark

A, B = TableId("public", "a"), TableId("public", "b")
SETUP = """
create table a (id int primary key, n int);
insert into a select i, 10 from generate_series(1, 5) i;
create table b (id int primary key, n int);
insert into b select i, 10 from generate_series(1, 5) i;
create table cdc_markers (
  marker uuid primary key default gen_random_uuid(), name text, extra int);
"""
MARKERS = {"table": "cdc_markers"}


@pytest.fixture
def source(copied_lake: NewLake) -> Iterator[Lake]:
    staging = {"flush_bytes": "1MB"}
    with copied_lake(SETUP, "public.a", "public.b", markers=MARKERS, staging=staging) as opened:
        yield opened


def insert(*names: str) -> str:
    return "".join(f"insert into cdc_markers (name) values ('{name}');" for name in names)


def sums(source: Lake, name: str) -> list[int]:
    return [
        source.session.sql(
            f"select sum(n) from {source.lake_table(table).sql_name} version as of 'mark_{name}'"
        ).collect()[0][0]
        for table in (A, B)
    ]


def names(source: Lake) -> list[str]:
    return [known.name for known in log.marks(source.pipeline.store)]


def test_the_mark_has_its_transaction_and_all_before_it_and_nothing_after_it(source: Lake) -> None:
    source.execute("update a set n = 20 where id = 1")
    source.execute(f"begin; update b set n = 20 where id = 1; {insert('one')}"
                   "update b set n = 30 where id = 2; commit")  # fmt: skip
    source.execute("update a set n = 99; update b set n = 99")
    source.execute(insert("two"))
    source.execute("update a set n = 0")
    source.catch_up()  # all of that in one go
    assert names(source) == ["one", "two"]
    assert sums(source, "one") == [60, 80]
    assert sums(source, "two") == [495, 495]
    [one, two] = log.marks(source.pipeline.store)
    assert one.lsn < two.lsn
    assert {row[0] for row in source.pipeline.store.connection.execute(
        "select distinct table_name from log_index")} == {"public.a", "public.b"}  # fmt: skip


def test_a_marker_amid_a_huge_transaction_is_of_its_commit(source: Lake) -> None:
    much = "insert into a select i, 1 from generate_series({}, {}) i"
    source.execute(f"begin; {much.format(10, 30_009)}; {insert('huge')}"
                   f"{much.format(30_010, 60_009)}; commit; update a set n = 0")  # fmt: skip
    source.catch_up()
    entries = source.pipeline.store.entries(A, 0)
    assert len(entries) > 2, "the transaction was staged in parts"
    assert sums(source, "huge") == [60_050, 50]


def test_what_cannot_be_a_mark_is_told_and_stops_nothing(source: Lake) -> None:
    source.execute(insert("twice"))
    source.execute(f"begin; {insert('twice', 'a b', 'good')} commit")
    source.execute("insert into cdc_markers (name) values (null)")
    source.execute("update cdc_markers set name = 'changed' where name = 'good'")
    source.execute("delete from cdc_markers where name = 'twice'; truncate cdc_markers")
    source.execute("alter table cdc_markers rename name to other;"
                   " insert into cdc_markers (other) values ('lost')")  # fmt: skip
    source.execute("alter table cdc_markers rename other to name;" + insert("again"))
    source.execute("begin;" + insert(*(f"m{n}" for n in range(103))) + "commit")
    source.execute("update a set n = 1")
    source.catch_up()
    made = names(source)
    assert made[:3] == ["twice", "good", "again"]
    assert len(made) == 103
    refused = [(found.name, found.reason) for found in refused_markers(source.pipeline.store)]
    assert [name for name, _ in refused] == ["twice", "a b", "", "", "m100"]
    assert [reason.split(".")[0] for _, reason in refused] == [
        "there is a mark twice already",
        "'a b' can't be the name of a mark",
        *["'' can't be the name of a mark"] * 2,
        "its transaction has more than 100 of them",
    ]
    assert sums(source, "good") == [50, 50]
    assert source.rows(A)[0] == (1, 1)


def test_a_marker_is_taken_once_however_often_its_commit_is_sent(source: Lake) -> None:
    source.execute("update a set n = 11;" + insert("once"))
    source.flush()
    log.forget(source.pipeline.store, "once")
    source.execute("update a set n = 12")
    source.flush()
    source.flush()
    assert names(source) == []


def test_the_tables_of_a_follower_are_tagged_though_nothing_of_them_waits(source: Lake) -> None:
    follower = Follower(source.tables, stop := threading.Event(), Listener(lambda _: None))

    def follow(_: threading.Event) -> None:
        with Pipeline.open(source.config) as pipeline:
            follower.work(pipeline, source.session)

    with flushing(source.config), beside(follow):
        try:
            source.execute(insert("quiet"))
            wait_for(lambda: [
                table.state for known in log.marks(source.pipeline.store) for table in known.tables
            ] == [MarkState.TAGGED] * 2)  # fmt: skip
        finally:
            stop.set()
    assert sums(source, "quiet") == [50, 50]


def test_a_command_that_was_interrupted_is_gone_on_with(source: Lake) -> None:
    source.execute("insert into cdc_markers (name) values ('begun')")
    with flushing(source.config) as progress:
        found = mark(source.pipeline, source.session, "begun", published=True)
        assert [table.state for table in found.tables] == [MarkState.TAGGED] * 2
        assert progress.state == "streaming"


def test_a_source_that_takes_no_row_says_what_it_said(source: Lake) -> None:
    source.execute("alter table cdc_markers add check (name <> 'none')")
    with pytest.raises(ConfigurationError, match=r"no marker can be inserted.* check constraint"):
        mark(source.pipeline, source.session, "none", published=True)


def test_a_mark_is_published_by_the_command_and_by_who_has_no_right_told(source: Lake) -> None:
    with flushing(source.config) as progress:
        wait_for(lambda: progress.state == "streaming")
        source.execute("update a set n = 20")
        found = mark(source.pipeline, source.session, "all", published=True)
        assert [table.state for table in found.tables] == [MarkState.TAGGED] * 2
        assert source.execute("select name from cdc_markers") == [("all",)]
        assert sums(source, "all") == [100, 50]
        with pytest.raises(ConfigurationError, match="there is a mark all already"):
            mark(source.pipeline, source.session, "all", published=True)
        source.execute("alter publication cdc_src drop table cdc_markers")
        with pytest.raises(ConfigurationError, match="wasn't in the stream"):
            mark(source.pipeline, source.session, "unheard", published=True)
        source.execute("drop table cdc_markers")
        with pytest.raises(ConfigurationError, match="no marker can be inserted"):
            mark(source.pipeline, source.session, "none", published=True)
