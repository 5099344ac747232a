"""Tables that a pattern stands for: they come with the next load, go, and change no other table."""

from __future__ import annotations

import json
import logging
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

from cdc_assets.cli.main import cli
from cdc_assets.components import PostgresSource
from cdc_assets.config.source import SourceConfig, config_from_parent, parse_config
from cdc_assets.dagster.build import loaded
from cdc_assets.errors import ConfigurationError, EnvironmentProblem
from cdc_assets.flusher.flusher import run
from cdc_assets.observe.report import look, part_rows
from cdc_assets.operations.drop_table import drop_table
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.slots import current_lsn
from cdc_assets.readiness.source.server import preflight
from cdc_assets.setup import discovery
from cdc_assets.setup.discovery import discovered
from cdc_assets_tests.conftest import NewDatabase

Source = psycopg.Connection[Any]


@pytest.fixture
def dsn(postgres_dsn: NewDatabase, tmp_home: Path) -> str:
    return postgres_dsn()


@pytest.fixture
def there(dsn: str) -> Iterator[Source]:
    with psycopg.connect(dsn, autocommit=True) as source:
        for name in ("orders", "customers", "tmp_x"):
            source.execute(f"create table {name} (id int primary key)".encode())
        source.execute("create table parts (id int) partition by range (id)")
        source.execute("create table parts_1 partition of parts default")
        source.execute("create view seen as select * from orders")
        yield source


def config_of(dsn: str, *tables: Any, **more: Any) -> SourceConfig:
    data = {"name": "found", "postgres": {"dsn": dsn}, "tables": tables or ["public.*"], **more}
    return parse_config(data, "test")


def names(config: SourceConfig) -> list[str]:
    return [table.id.name for table in config.tables]


def test_no_pattern_stands_for_the_table_of_signals(dsn: str, there: Source) -> None:
    there.execute("create table signalling (id text primary key, type text, data text)")
    config = discovered(config_of(dsn, backfills={"signals": "public.signalling"}))
    assert sorted(names(config)) == ["customers", "orders", "parts", "tmp_x"]


def test_a_pattern_stands_for_the_tables_that_are_there(dsn: str, there: Source) -> None:
    there.execute('create table "My.Table" (id int primary key)')
    entries = ["orders", {"name": "public.*", "freshness": {"warn": "2m"}}]
    config = discovered(config_of(dsn, *entries, exclude=["public.tmp_*"]))
    assert names(config) == ["orders", "customers", "parts", "My.Table"]
    warned = [table.freshness.warn.total_seconds() for table in config.tables]
    assert warned == [300, 120, 120, 120]
    again = config_from_parent(config.dump())  # what a flusher is given
    assert (again.tables, again.patterns) == (config.tables, config.patterns)
    assert discovered(config_of(dsn, "orders")) == config_of(dsn, "orders")


def test_glue_has_what_it_can_name(
    dsn: str, there: Source, caplog: pytest.LogCaptureFixture
) -> None:
    there.execute('create table "Users" (id int primary key)')
    there.execute('create table "order-items" (id int primary key)')
    glue = {"type": "glue", "warehouse": "s3://bucket/warehouse"}
    with caplog.at_level(logging.WARNING):
        config = discovered(config_of(dsn, lake={"catalog": glue}))
    assert {t.as_ for t in config.tables} == {"orders", "customers", "parts", "tmp_x", "users"}
    assert 'public."order-items" is left out: Glue takes no such name' in caplog.text
    with pytest.raises(ConfigurationError, match=r'the name of no table .*"order-items"'):
        discovered(config_of(dsn, "public.*items", lake={"catalog": glue}))
    assert config_from_parent(config.dump()).tables == config.tables


def test_all_that_it_stands_for_is_streamed(dsn: str, there: Source) -> None:
    there.execute("create table keyless (id int)")  # it stops no other
    config = discovered(config_of(dsn, snapshot={"mode": "never"}))
    run(config, until=current_lsn(there))
    there.execute("insert into orders values (1); insert into customers values (1)")
    run(config, until=current_lsn(there))
    with Pipeline.open(config) as pipeline:
        states = {row.table.name: str(row.state) for row in pipeline.store.tables()}
    assert {name for name, state in states.items() if state == "parked"} == {"keyless", "parts"}
    there.execute("update keyless set id = 2; update parts set id = 2")


def test_a_table_that_comes_is_told_and_taken_at_the_next_load(dsn: str, there: Source) -> None:
    config = discovered(config_of(dsn))

    def told(config: SourceConfig) -> dict[str, str]:
        return {f.code: f.message for f in preflight(there, config, tables=())}

    assert "tables_new" not in told(config)
    there.execute("create table late (id int primary key); drop table customers")
    assert "public.late" in told(config)["tables_new"]
    assert names(discovered(config_of(dsn))) == ["orders", "tmp_x", "parts", "late"]
    assert "tables_new" not in told(discovered(config_of(dsn)))


def test_a_table_without_a_name_in_the_lake_is_told_as_that(dsn: str, there: Source) -> None:
    there.execute('create table "ORDERS" (id int primary key)')
    config = discovered(config_of(dsn))
    there.execute("create table late (id int primary key)")
    told = {f.code: f for f in preflight(there, config, tables=())}
    assert "ORDERS" not in told["tables_new"].message
    assert 'public."ORDERS"' in told["tables_unnamed"].message
    assert "public.late" not in told["tables_unnamed"].message
    assert "with as:" in (told["tables_unnamed"].remedy or "")
    named = discovered(config_of(dsn, "*", {"name": 'public."ORDERS"', "as": "upper"}))
    assert "tables_unnamed" not in {f.code for f in preflight(there, named, tables=())}


def test_a_table_that_was_dropped_is_given_up_by_a_command(dsn: str, there: Source) -> None:
    """It isn't in the configuration, from which a remedy could have it taken."""
    entries = ["orders", "public.*"]
    before = discovered(config_of(dsn, *entries, snapshot={"mode": "never"}))
    run(before, until=current_lsn(there))
    there.execute("drop table customers, orders cascade")
    after = discovered(config_of(dsn, *entries, snapshot={"mode": "never"}))
    command = "cdc-assets drop-table public.customers"
    with Pipeline.open(after) as pipeline:

        def remedies(config: SourceConfig) -> dict[str | None, str]:
            found = preflight(there, config, pipeline.store, dsn)
            return {f.table: f.remedy for f in found if f.code == "table_dropped"}

        assert remedies(after)["public.customers"].endswith(command)
        assert "Take it out" not in remedies(after)["public.customers"]
        assert "Take it out of the configuration" in remedies(after)["public.orders"]
        loaded_before = remedies(before)["public.customers"]
        assert "Reload the code location" in loaded_before
        assert command in loaded_before
        parts = dict(part_rows(look(pipeline, sample=False)))
        assert command in parts["dropped in the source: public.customers"]
        assert not any("still staged" in part for part in parts)
        drop_table(pipeline, TableId("public", "customers"))
        assert remedies(after).keys() == {"public.orders"}
        assert look(pipeline, sample=False).status.dropped == ()


def test_a_table_that_was_parked_as_dropped_is_told_when_no_pattern_stands_for_it(
    dsn: str, there: Source
) -> None:
    """The flusher sees it first; then the source is loaded again."""
    before = discovered(config_of(dsn, snapshot={"mode": "never"}))
    run(before, until=current_lsn(there))
    there.execute("insert into customers values (1)")
    run(before, until=current_lsn(there))
    there.execute("drop table customers")
    run(before, until=current_lsn(there))
    after = discovered(config_of(dsn, snapshot={"mode": "never"}))
    with Pipeline.open(after) as pipeline:
        row = pipeline.store.table(TableId("public", "customers"))
        assert row is not None and str(row.state) == "parked"
        told = {f.table: f for f in preflight(there, after, pipeline.store, dsn)}
        assert told["public.customers"].code == "table_left"
        command = "cdc-assets drop-table public.customers"
        assert told["public.customers"].remedy.startswith(command)
        assert look(pipeline, sample=False).status.dropped == ("public.customers",)
        drop_table(pipeline, TableId("public", "customers"))
        assert look(pipeline, sample=False).status.dropped == ()
        assert "public.customers" not in {f.table for f in preflight(there, after, pipeline.store)}


def test_no_table_that_comes_or_goes_changes_the_name_of_another(
    dsn: str, there: Source, caplog: pytest.LogCaptureFixture
) -> None:
    there.execute("create schema sales; create table sales.orders (id int primary key)")

    def lake(*tables: str) -> dict[str, str]:
        config = discovered(config_of(dsn, *tables))
        return {str(table.id): config.lake_name(table.id) for table in config.tables}

    one, both, every = lake("public.*"), lake("public.*", "sales.*"), lake("*.*")
    assert one["public.orders"] == "orders"
    assert both["public.orders"] == every["public.orders"] == "public_orders"
    assert both["sales.orders"] == every["sales.orders"] == "sales_orders"
    assert lake("public.orders", "sales.*")["public.orders"] == "orders"  # as without the pattern
    named = lake("sales.orders", "public.*")  # the name is taken, and no other one changes
    assert named == {"sales.orders": "orders", **one, "public.orders": "public_orders"}
    there.execute("drop table sales.orders")
    assert lake("public.*", "sales.*")["public.orders"] == "public_orders"
    there.execute('create table "ORDERS" (id int primary key)')  # the lake ignores case
    assert lake("public.*") == one
    assert 'public."ORDERS" is left out' in caplog.text


def test_a_table_that_is_called_like_a_copy_is_left_out(
    dsn: str, there: Source, caplog: pytest.LogCaptureFixture
) -> None:
    there.execute("create table orders__copy_1 (id int primary key)")
    there.execute("create table lone__copy_1 (id int primary key)")
    with caplog.at_level(logging.WARNING):
        found = names(discovered(config_of(dsn)))
    assert "orders__copy_1 is left out: a copy of orders may have its name" in caplog.text
    assert ("lone__copy_1" in found, "orders__copy_1" in found) == (True, False)
    with pytest.raises(ConfigurationError, match="would have the name of a copy of orders; give"):
        config_of(dsn, "orders", "orders__copy_1")


def test_who_finds_the_source_away_has_the_tables_of_the_last_load(
    dsn: str, there: Source, tmp_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    known = discovered(config_of(dsn), keep=True)
    away = "postgresql://nobody:hush@127.0.0.1:1/none"
    with caplog.at_level(logging.WARNING):
        assert names(discovered(config_of(away))) == names(known)
    assert "as it is away" in caplog.text
    with pytest.raises(EnvironmentProblem, match="can't be listed") as refused:
        discovered(config_of(away, "sales.*"))
    assert "hush" not in str(refused.value)
    there.execute("create table late (id int primary key); drop table tmp_x")
    assert "late" in names(discovered(config_of(dsn)))  # a command, which changes no run's tables
    assert names(discovered(config_of(dsn), ask=False)) == names(known)  # the process of a run
    [kept] = tmp_home.glob("**/tables.json")
    kept.write_text("{")
    assert "late" in names(discovered(config_of(dsn), ask=False))
    kept.unlink()
    kept.mkdir()  # nothing can be written there
    assert "late" in names(discovered(config_of(dsn), keep=True))
    assert "can't be kept" in caplog.text


def test_who_only_looks_at_the_definitions_changes_no_run(
    dsn: str, there: Source, tmp_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``dg list defs``, say; a code server alone keeps what it found, and runs go by that."""
    monkeypatch.setattr(sys, "argv", ["dagster", "api", "grpc", "--socket", "s"])
    known = loaded(config_of(dsn))
    there.execute("create table late (id int primary key)")
    monkeypatch.setattr(sys, "argv", ["dg", "list", "defs"])
    assert "late" in names(loaded(config_of(dsn)))
    monkeypatch.setattr(sys, "argv", ["dagster", "api", "execute_run", "{}"])
    assert names(loaded(config_of(dsn))) == names(known)
    monkeypatch.setattr(sys, "argv", ["dagster", "api", "grpc"])
    assert "late" in names(loaded(config_of(dsn)))


def test_a_source_that_hangs_holds_up_no_load_for_long(
    tmp_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "_ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(EnvironmentProblem, match="no answer in"):
            discovered(config_of(f"postgresql://a@127.0.0.1:{port}/b"))


def test_where_there_is_no_such_table_that_is_said(dsn: str, there: Source) -> None:
    with pytest.raises(ConfigurationError, match=r"has no table sales\.\*"):
        discovered(config_of(dsn, "sales.*"))


def test_commands_and_components_have_its_tables(dsn: str, there: Source, tmp_path: Path) -> None:
    data = {"name": "found", "postgres": {"dsn": dsn}, "tables": ["public.*"]}
    path = tmp_path / "found.json"
    path.write_text(json.dumps(data))
    result = CliRunner().invoke(cli, ["--config", str(path), "tables", "--json"])
    listed = {row["table"]: row["configured"] for row in json.loads(result.stdout)}
    assert set(listed.values()) == {True}
    component = PostgresSource.from_attributes_dict(attributes=data)
    assert isinstance(component, PostgresSource)
    assert {str(table.id) for table in component.config.tables} == set(listed)


@pytest.mark.parametrize(
    ("entry", "more", "said"),
    [
        (
            {"name": "a.*", "columns": {"exclude": ["x"]}},
            {},
            "columns is for a table that is named",
        ),
        ({"name": "a.*", "partition_by": ["x"]}, {}, "partition_by is for a table"),
        ("a.*.b", {}, "names no table"),
        ("a.b", {"exclude": ["x y"]}, "names no table"),
        ("a.b", {"patterns": ["a.*"]}, "patterns and found: unknown"),
        ({"name": "a.b", "found": True}, {}, "patterns and found: unknown"),
        ("a.b", {"verify": {"fail_after": float("inf")}}, "inf is too long"),
        ("a.*", {"postgres": {"embedded": True}}, "name each table of an embedded"),
    ],
)
def test_a_pattern_that_cannot_be_is_refused(entry: Any, more: dict[str, Any], said: str) -> None:
    data = {"name": "a", "postgres": {"dsn": "host=h"}, "tables": [entry], **more}
    with pytest.raises(ConfigurationError, match=said):
        parse_config(data, "test")
