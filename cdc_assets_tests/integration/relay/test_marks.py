"""Marks of a second lake: its own, or those of a marker, which both make at one commit."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.errors import ConfigurationError
from cdc_assets.log.asked.marks import make
from cdc_assets.marks.diff.whole import diff
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support.flusher import Bench
from cdc_assets_tests.support.lake import NewLake
from cdc_assets_tests.support.second import second_lake, second_log

A, T = TableId("public", "a"), TableId("public", "t")
MARKERS = {"table": "public.cdc_markers"}
SETUP = """
create table cdc_markers (marker uuid primary key default gen_random_uuid(), name text);
create table t (id int primary key, v text);
insert into t select i, 'v' from generate_series(1, 9) i;
"""


def test_marks_of_the_second_are_its_own(source: Bench, first: SourceConfig) -> None:
    with second_log(source, first) as second:
        second.pin()
        source.execute("insert into a select generate_series(1, 10)")
        source.flush(first)
        second.flush()
        make(second.store, "here", [A])
        assert source.ask_log(
            'select source, "offset" from _pg2iceberg.marked_tables where name = %s', "here"
        ) == [(second.config.name, 10)]


def test_a_marker_marks_both_at_one_commit(source: Bench, tmp_home: Path) -> None:
    source.execute("create table a (id int primary key, v text)")
    source.execute(
        "create table cdc_markers (marker uuid primary key default gen_random_uuid(), name text)"
    )
    settings = {**source.settings("a"), "markers": MARKERS}
    config = parse_config(settings, "test")
    source.flush(config)
    with second_log(source, config, markers={}) as second:
        second.pin()
        for number in range(3):
            source.execute(f"insert into a select {10 * number} + generate_series(1, 5)")
            source.execute(f"insert into cdc_markers (name) values ('m{number}')")
        source.execute("insert into a values (1000)")
        source.flush(config)
        second.flush()
        marks = source.ask_log(
            'select m.source, m.name, m.lsn::text, t."offset" from _pg2iceberg.marks m'
            " join _pg2iceberg.marked_tables t using (source, name) order by 1, 2"
        )
        mine = [mark[1:] for mark in marks if mark[0] == second.config.name]
        assert mine == [mark[1:] for mark in marks if mark[0] == config.name]
        assert [offset for *_, offset in mine] == [5, 10, 15]


@pytest.mark.spark
def test_both_lakes_are_compared_at_a_marker(copied_lake: NewLake) -> None:
    kept = [{"name": "t", "mode": "soft_delete"}]
    with (
        copied_lake(SETUP, "t", markers=MARKERS) as first,
        second_lake(first, markers={}, tables=kept) as second,
    ):
        first.execute("update t set v = 'x' where id < 5; delete from t where id = 9")
        first.execute("insert into cdc_markers (name) values ('m')")
        first.execute("update t set v = 'later'")
        for lake in (first, second):
            lake.catch_up()
        make(first.pipeline.store, "alone", [T])
        for blue, green in ((first, second), (second, first)):
            (found,) = diff(blue.config, green.config, "m", []).tables
            assert (found.outcome, found.problem) == ("equal", None)
            assert found.rows is not None and (found.rows.blue, found.rows.green) == (8, 8)
            with pytest.raises(ConfigurationError, match="has no mark alone") as raised:
                diff(blue.config, green.config, "alone", [])
            assert "where one is the second lake of the other, in the other" in raised.value.remedy
