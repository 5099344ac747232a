"""What check, status and the definitions say of a second lake."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg
import pytest
from click.testing import CliRunner

from cdc_assets.cli.main import cli
from cdc_assets.config.source import SourceConfig
from cdc_assets.dagster.build import build_defs
from cdc_assets.log.copies.chunks import restart_copy
from cdc_assets.log.figures.work import Work, add
from cdc_assets.observe.facts import Facts
from cdc_assets.observe.report import problems
from cdc_assets.observe.status import collect
from cdc_assets.operations.drop import drop_source
from cdc_assets.operations.drop_table import drop_table
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.readiness.flushing import refuse_to_flush, source_findings
from cdc_assets_tests.support.flusher import Bench
from cdc_assets_tests.support.second import GROUP, second_config, second_log


def said(config: SourceConfig, folder: Path, *words: str) -> str:
    file = folder / "asked.json"
    file.write_text(config.dump())
    done = CliRunner().invoke(cli, ["--config", str(file), *words])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_check_knows_the_first(source: Bench, first: SourceConfig) -> None:
    tables = [{"name": "a", "columns": {"exclude": ["v"]}}, {"name": "b"}, {"name": "c"}]
    source.execute("create table c (id int primary key)")
    found = source_findings(second_config(first, tables=tables))
    about = {(finding.code, finding.table): finding for finding in found}
    assert about["log_of", None].severity == "info"
    assert about["log_differs", "public.a"].severity == "error"
    assert about["log_lacks_table", "public.c"].severity == "warning"
    assert "wal_unbounded" in {code for code, _ in about}, "pins take slots of the server"
    assert not {"slot", "publication", "replica_identity"} & {finding.code for finding in found}
    assert {f.code for f in found if f.severity == "error"} == {"log_differs"}
    refuse_to_flush(second_config(first))


def test_before_the_first_has_a_log_it_waits(source: Bench, tmp_home: Path) -> None:
    source.execute("create table a (id int primary key)")
    first = source.config("a")
    with second_log(source, first) as second:
        second.pins.prepare()
        second.pins.tick()
        codes = {finding.code for finding in source_findings(second.config)}
        assert "log_missing" in codes
        state, reason = second.state("a")
        assert state == "waiting"
        assert reason == (
            f"source {first.name} has no log in this coordination schema yet: start it, or correct"
            " log.of."
        )
        source.flush(first)
        second.pin()
        assert second.state("a") == ("streaming", None)


def test_a_second_lake_that_nobody_maintains_is_told(source: Bench, first: SourceConfig) -> None:
    """What it has merged is kept for it, and its group isn't behind."""
    days = timedelta(days=1)

    def told() -> list[tuple[str, bool]]:
        with Pipeline.open(first) as pipeline:
            status = collect(pipeline)
        assert [group.name for group in status.groups] == [GROUP]
        found = problems(Facts(datetime.now(UTC), status=status), first)
        return [
            (problem.condition.what, problem.severity == "fail")
            for problem in found
            if problem.condition.key == f"group_care:{GROUP}"
        ]

    def passed(time: timedelta) -> None:
        source.ask_log("update _pg2iceberg.work_done set ended_at = ended_at - %s", time)
        source.ask_log("update _pg2iceberg.tables set updated_at = updated_at - %s", time)

    what = f"the second lake of the consumer group {GROUP} isn't maintained"
    with second_log(source, first) as second:
        second.pin()
        assert told() == []
        passed(3 * days)
        assert told() == [(what, False)]
        add(second.store.connection, second.store.source, Work("maintenance"))
        assert told() == []
        passed(8 * days)
        assert told() == [(what, True)]
        for row in second.store.tables():
            restart_copy(second.store, row)
        assert told() == [], "what waits for its copy has merged nothing"
        second.pin()
        assert told() == [], "it couldn't be maintained before"


def test_status_tells_whose_log_it_is(source: Bench, first: SourceConfig, tmp_path: Path) -> None:
    with second_log(source, first) as second:
        second.pin()
        second.flush()
        assert f"that of source {first.name}" in said(second.config, tmp_path, "status")
        told = json.loads(said(second.config, tmp_path, "status", "--json"))
        assert told["log_of"] == first.name
        assert told["slot"]["exists"] is False
        assert told["left"] == []
        (group,) = json.loads(said(first, tmp_path, "status", "--json"))["groups"]
        assert (group["name"], group["tables"]) == ("eu", 2)
        dropped = said(second.config, tmp_path, "drop-source", "--yes", second.config.name)
        assert dropped == ""
        assert json.loads(said(first, tmp_path, "status", "--json"))["groups"] == []


def test_check_knows_what_is_left_and_gives_up_nothing_of_the_first(
    source: Bench, first: SourceConfig
) -> None:
    with second_log(source, first) as second:
        second.pin()
        second.store.park(TableId("public", "b"), "why")
        without = second_config(first, tables=[{"name": "b"}])
        for given_up in (False, True):
            found = {f.code: f for f in source_findings(without)}
            assert "why" in found["table_parked"].message
            assert "slot_unread" not in found, "that of the first, which is down"
            assert ("table_left" in found) is not given_up
            assert not [f for f in found.values() if "publication" in f.remedy.lower()]
            with Pipeline.open(without) as pipeline:
                if not given_up:
                    assert found["table_left"].remedy.startswith("cdc-assets drop-table public.a;")
                    drop_table(pipeline, TableId("public", "a"))
                else:
                    drop_source(pipeline)
        assert "source_dropped" in {f.code for f in source_findings(without)}


def test_definitions_of_both(source: Bench, first: SourceConfig) -> None:
    both = dg.Definitions.merge(build_defs(first), build_defs(second_config(first)))
    name, other = first.name, second_config(first).name
    graph = both.resolve_asset_graph()
    parents = graph.get(dg.AssetKey(["staged_log", other, "public", "a"])).parent_keys
    assert parents == {dg.AssetKey(["staged_log", name, "public", "a"])}
    lake = {**json.loads(first.dump())["lake"], "namespace": first.namespace}
    with pytest.raises(dg.DagsterInvalidDefinitionError, match="asset key"):
        dg.Definitions.merge(
            build_defs(first), build_defs(second_config(first, lake=lake))
        ).resolve_asset_graph()
