"""Excluded columns stay in the source, whatever they are called by then."""

from __future__ import annotations

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.postgres.slots import current_lsn
from cdc_assets_tests.support.flusher import Bench, flushing
from cdc_assets_tests.support.waiting import wait_for


def _without(source: Bench, *excluded: str) -> SourceConfig:
    settings = source.settings("public.t", flush_interval="20ms")
    settings["tables"] = [{"name": "public.t", "columns": {"exclude": list(excluded)}}]
    return parse_config(settings, "test")


def test_an_excluded_column_stays_in_the_source_under_any_name(source: Bench) -> None:
    source.execute("create table t (id int primary key, secret text, v text)")
    config = _without(source, "secret", "later")
    source.flush(config)
    source.execute("insert into t values (1, 'S3CRET', 'a')")
    written = current_lsn(source.connection)
    with flushing(config):  # one session sees it all
        wait_for(lambda: source.flushed() >= written)
        source.execute("alter table t rename secret to open; alter table t add w text")
        source.execute("insert into t values (2, 'S3CRET', 'b', 'new')")
        source.execute("alter table t rename v to secret; alter table t rename open to v")
        source.execute("update t set v = 'S3CRET too', w = 'x' where id = 2")
        source.execute("alter table t rename secret to u; alter table t add later text")
        source.execute("insert into t values (3, 'S3CRET', 'c', 'w', 'S3CRET')")
        written = current_lsn(source.connection)
        wait_for(lambda: source.flushed() >= written)
    source.execute("alter table t rename later to soon")  # and another one begins here
    source.execute("insert into t values (4, 'S3CRET', 'd', 'w', 'S3CRET')")
    source.flush(config)
    rows = source.log("public.t")
    assert [row.data for row in rows] == [
        {"id": "1", "v": "a"},
        {"id": "2", "v": "b", "w": "new"},
        {"id": "2", "w": "x"},
        {"id": "3", "w": "w"},  # u was called secret for a while
        {"id": "4", "w": "w"},
    ]
    assert source.parked() == {}


def test_what_may_be_an_excluded_column_parks_its_table(source: Bench) -> None:
    source.execute("create table t (id int primary key, secret text, v text)")
    config = _without(source, "secret")
    source.flush(config)
    source.execute("alter table t drop secret; insert into t values (1, 'fine')")
    source.execute("alter table t rename v to w; alter table t add x text")
    source.execute("insert into t values (2, 'fine', 'x')")
    source.flush(config)
    assert [row.data for row in source.log("public.t")] == [
        {"id": "1"},
        {"id": "2", "w": "fine", "x": "x"},
    ]
    assert "v may be what columns.exclude or columns.mask names" in source.parked()["public.t"]
    assert "resync" in source.parked()["public.t"]


def test_a_relation_that_looks_as_before_may_be_another_one(source: Bench) -> None:
    source.execute("create table t (id int primary key, v text, secret text)")
    config = _without(source, "secret")
    source.flush(config)
    with flushing(config):
        source.execute("insert into t values (1, 'a', 'S3CRET')")
        wait_for(lambda: len(source.log("public.t")) == 1)
        source.execute(
            "begin; alter table t drop v; alter table t rename secret to v;"
            " alter table t add secret text; update t set v = 'S3CRET too'; commit"
        )
        wait_for(lambda: len(source.log("public.t")) == 2)
    assert [row.data for row in source.log("public.t")] == [{"id": "1", "v": "a"}, {"id": "1"}]
    assert "v may be what columns.exclude or columns.mask names" in source.parked()["public.t"]
