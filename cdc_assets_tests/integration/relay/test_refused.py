"""What a second lake can't have, or has to wait for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from cdc_assets.config.groups.consumers import ConsumerConfig
from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.consumers import follow
from cdc_assets.consumers.drop import drop_group
from cdc_assets.errors import ConfigurationError, SourceMismatch
from cdc_assets.flusher.flusher import run
from cdc_assets.maintenance.run import maintain
from cdc_assets.materializer.workers.worker import Worker
from cdc_assets.operations.copying import resume
from cdc_assets.operations.drop import drop_source
from cdc_assets.operations.state.migrate import migrate_state
from cdc_assets.pins.row_filter import row_filter
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.readiness.flushing import source_findings
from cdc_assets_tests.support.flusher import Bench
from cdc_assets_tests.support.second import GROUP, copied_anew, pinned, second_config, second_log

A = TableId("public", "a")


def unasked() -> SparkSession:
    raise AssertionError


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"columns": {"exclude": ["v"]}}, "excludes nothing, and here v is excluded"),
        ({"columns": {"mask": {"v": "redact"}}}, "masks nothing, and here v is masked"),
        ({"where": "id > 3"}, "has its rows where true"),
    ],
)
def test_what_is_staged_otherwise_is_refused(
    source: Bench, first: SourceConfig, entry: dict[str, Any], said: str
) -> None:
    with second_log(source, first, tables=[{"name": "a", **entry}, {"name": "b"}]) as second:
        second.pin()
        state, reason = second.state("a")
        assert state == "parked"
        assert reason is not None and said in reason and "cdc-assets resync public.a" in reason
        assert second.state("b")[0] == "streaming"
    with second_log(source, first) as second:  # as the first one's, now
        copied_anew(second.config)
        second.pin()
        assert second.state("a")[0] == "streaming"


def test_a_table_that_the_first_doesn_t_have_waits(source: Bench, first: SourceConfig) -> None:
    source.execute("create table c (id int primary key)")
    names = [{"name": name} for name in "abc"]
    with second_log(source, first, tables=names) as second:
        second.pins.prepare()
        second.pins.tick()
        state, reason = second.state("c")
        assert state == "waiting"
        assert reason == f"source {first.name} doesn't replicate it: add it to the tables: there."
        pinned(source.config("a", "b", "c"))
        second.pin()
        assert second.state("c")[0] == "streaming"


def test_inserts_alone_or_all_is_as_in_the_first(source: Bench, tmp_home: Path) -> None:
    """Each has its row filter in the publication that the first one put it into."""
    source.execute("create table had (id int primary key, v text)")
    source.execute("create table lacked (id int not null, v text)")
    names = ("had", "lacked")
    entries = [{"name": name, "mode": "append", "where": "id > 3"} for name in names]
    config = parse_config({**source.settings(), "tables": entries}, "test")
    source.flush(config)
    source.execute(
        "alter table had drop constraint had_pkey; alter table lacked add primary key (id)"
    )
    with second_log(source, config) as second:
        second.pins.prepare()
        second.pins.tick()
        assert [second.state(name) for name in names] == [("copying", None)] * 2
        assert not [f for f in source_findings(second.config) if f.severity == "error"]
        with second.pipeline.connect_source("test") as connection:
            for row in second.store.tables():
                assert row_filter(connection, second.config, row) == "(id > 3)"
        second.pin()
        source.execute("insert into lacked select generate_series(1, 9)")
        source.flush(config)  # the other one is parked there
        second.flush()
        assert second.is_whole("lacked")
        assert [entry[:2] for entry in second.entries("lacked")] == [(0, 6)]


def test_what_the_first_log_may_be(source: Bench, first: SourceConfig) -> None:
    with second_log(source, first) as second:
        second.pin()
        third = second_config(first, name="third", log={"of": second.config.name, "group": "x"})
        with pytest.raises(SourceMismatch, match="has no log of its own, but that of"):
            run(third, until=Lsn(1))
        with pytest.raises(ConfigurationError, match=f"is that of {second.config.name}, too"):
            migrate_state(first, source.dsn.replace(first.name, "postgres"))
        beside = second_config(first, name="beside")
        with pytest.raises(SourceMismatch, match=f"is the lake of source {second.config.name}"):
            run(beside, until=Lsn(1))
        program = first.model_copy(update={"consumers": (ConsumerConfig(name=GROUP),)})
        with (
            pytest.raises(ConfigurationError, match="is the lake of source"),
            follow(program, GROUP),
        ):
            pass
        with Pipeline.open(first) as pipeline:
            drop_source(pipeline)
        with pytest.raises(SourceMismatch, match="was dropped at") as raised:
            run(second.config)
        assert raised.value.codes == ("log_dropped",)


def test_a_group_of_programs_isn_t_taken_from_them(source: Bench, first: SourceConfig) -> None:
    """It would be set to the end of the log, and what they haven't read removed."""
    source.execute(
        "insert into _pg2iceberg.claims (consumer_group, source, table_name) values (%s, %s, %s);",
        *(GROUP, first.name, "public.a"),
    )
    with second_log(source, first) as second:
        with pytest.raises(SourceMismatch, match=f"{GROUP} of source {first.name} is that of pro"):
            second.pin()
        assert second.held() == {}
        with Pipeline.open(first) as pipeline:
            drop_group(pipeline, GROUP)
        second.pin()


def test_what_it_had_before_is_let_go_of_first(source: Bench, first: SourceConfig) -> None:
    own = parse_config({**source.settings("a", "b"), "name": f"{first.name}_eu"}, "test")
    source.flush(own)
    slots = "select slot_name from pg_replication_slots where slot_name like '%%_eu'"
    with second_log(source, first) as second:
        for _ in range(2):
            with pytest.raises(SourceMismatch, match="has a log of its own") as raised:
                run(second.config, until=Lsn(1))
            assert raised.value.codes == ("log_before",)
        assert source.execute(slots) == [(own.slot,)]
        with Pipeline.open(own) as pipeline:
            drop_source(pipeline)
            assert source.execute(slots) == []
            resume(pipeline)
        second.pin()
        second.flush()
        moved = second_config(first, log={"of": first.name, "group": "us"})
        with pytest.raises(SourceMismatch, match=f"of {first.name}, as its consumer group {GROUP}"):
            run(moved, until=Lsn(1))
        assert second.held() == {"public.a": 0, "public.b": 0}


def test_log_isn_t_taken_out_before_what_it_holds_is_let_go_of(
    source: Bench, first: SourceConfig
) -> None:
    """Whatever the source is without it: each would leave the group's cursors for ever."""
    with second_log(source, first) as second:
        second.pin()
        second.flush()
        held = second.held()
        queried: dict[str, Any] = {
            "query": {"every": "30s"},
            "tables": [{"name": "a", "watermark": {"column": "id", "order": "sequence"}}],
        }
        streamed = {"publication": first.publication}
        for settings in (streamed, queried, {"snapshot": {"mode": "snapshot_only"}}):
            without = second_config(first, log=None, **settings)
            with pytest.raises(SourceMismatch, match=f"that of {first.name}, as its") as raised:
                run(without, until=Lsn(1))
            assert raised.value.codes == ("log_before",)
            assert f"log: {{of: {first.name}, group: {GROUP}}}" in raised.value.remedy
            assert "drop-source" in raised.value.remedy
            assert "log_before" in {found.code for found in source_findings(without)}
            with Pipeline.open(without) as pipeline:
                with pytest.raises(SourceMismatch, match="that is that of"):
                    drop_source(pipeline)
                with pytest.raises(SourceMismatch, match="that is that of"):
                    migrate_state(without, source.dsn.replace(first.name, "postgres"))
                with pytest.raises(SourceMismatch, match="that is that of"):
                    [*maintain(pipeline, unasked, [A])]
                with pytest.raises(SourceMismatch, match="that is that of"), Worker(pipeline, [A]):
                    pass
        for name in "ab":
            copied_anew(second.config, f"public.{name}")
        with pytest.raises(SourceMismatch, match="as its"):
            run(second_config(first, log=None), until=Lsn(1))
        assert second.held() == held
        drop_source(second.pipeline)
        assert second.held() == {}


def test_a_table_that_was_created_anew_waits_until_the_first_knows(
    source: Bench, first: SourceConfig
) -> None:
    with second_log(source, first) as second:
        second.pin()
        source.execute("drop table a; create table a (id int primary key, v text)")
        copied_anew(second.config)
        second.pins.tick()
        state, reason = second.state("a")
        assert state == "waiting"
        assert reason is not None and "is another table of that name" in reason
        source.flush(first)  # it parks the table
        copied_anew(first)
        pinned(first)
        second.pin()
        assert second.state("a") == ("streaming", None)
        source.execute("insert into a values (1)")
        source.flush(first)
        second.flush()
        assert second.is_whole("a")
