"""What ``check`` says of columns before anything is copied."""

from __future__ import annotations

import re
from pathlib import Path

import psycopg
import pytest
import yaml

from cdc_assets.readiness.source.server import preflight
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.integration.readiness.test_check import config_of, found
from cdc_assets_tests.support.flusher import Bench


def made(new: NewDatabase, table: str) -> str:
    """The address of a database of its own with that table."""
    dsn = new()
    with psycopg.connect(dsn, autocommit=True) as source:
        source.execute(table.encode())
    return dsn


def test_what_becomes_of_odd_columns_is_said_before_anything_is_copied(
    postgres_dsn: NewDatabase, tmp_home: Path
) -> None:
    """As the page on types has it."""
    ready = made(
        postgres_dsn,
        "create table odd (at timestamptz primary key, doc jsonb, price numeric(10,2),"
        " loose numeric, tags text[], until date, plain int, hidden interval)",
    )
    tables = {"name": "odd", "columns": {"exclude": ["hidden"], "types": {"until": "string"}}}
    named = found(config_of(ready, tables))
    assert "doc (jsonb), loose (numeric), until (date)" in named["text_columns"].message
    assert "hidden" not in named["text_columns"].message
    values = named["unrepresentable_values"]
    assert "values of price, tags that the lake can't hold" in values.message
    assert "become NULL" in values.message
    assert "{price: string}" in values.remedy
    assert "its key has at;" in named["unrepresentable_keys"].message
    failing = {**tables, "columns": {"unrepresentable": "fail"}}
    assert (
        "make the table fail" in found(config_of(ready, failing))["unrepresentable_values"].message
    )
    assert {f.severity for code, f in named.items() if code.startswith("unrep")} == {"info"}


def test_what_is_not_in_the_lake_is_not_said_to_be_something_there(
    postgres_dsn: NewDatabase, tmp_home: Path
) -> None:
    ready = made(
        postgres_dsn,
        "create table made (id int primary key, doc jsonb, hidden text,"
        " twice numeric generated always as (id * 2) stored,"
        " day date generated always as ('2000-01-01'::date + id) stored);"
        " create publication cdc_src for table made",  # before 18, without them
    )
    named = found(config_of(ready, {"name": "made", "columns": {"exclude": ["hidden"]}}))
    assert "(twice, day)" in named["generated_columns"].message
    assert named["text_columns"].message.endswith("prints it: doc (jsonb).")
    assert "unrepresentable_values" not in named
    assert named["toast_columns"].message.endswith(
        "of doc out; they are completed from the lake's own row."
    )


def test_a_column_name_makes_no_line_and_no_yaml_of_its_own(
    postgres_dsn: NewDatabase, tmp_home: Path
) -> None:
    ready = made(
        postgres_dsn,
        'create table evil (id int primary key, "x\nerror lost: public.orders" jsonb,'
        ' "a, b" jsonb, "x}, {y: z" date)',
    )
    named = found(config_of(ready, "evil"))
    said = named["text_columns"].message
    assert '"x error lost: public.orders" (jsonb), "a, b" (jsonb)' in said
    assert "\n" not in said
    settings = named["unrepresentable_values"].remedy.removeprefix("columns: ").split(" keeps ")[0]
    assert yaml.safe_load(settings) == {"types": {"x}, {y: z": "string"}}


@pytest.mark.parametrize(("postgres_version", "upgrade"), [(16, True), (18, False)])
def test_nobody_is_told_to_upgrade_to_what_he_has(source: Bench, upgrade: bool) -> None:
    """Postgres 18 sends stored columns, and no version sends virtual ones, which came with it."""
    kind = "stored" if upgrade else "virtual"
    source.execute(
        f"create table t (id int primary key, d int generated always as (id * 2) {kind})"
    )
    remedy = next(
        finding.remedy
        for finding in preflight(source.connection, source.config("t"))
        if finding.code == "generated_columns"
    )
    assert ("Postgres 18" in remedy) is upgrade
    assert "view" in remedy


# What stands for a type of the page in a table, where it isn't the type's own name.
COLUMNS = {
    "char": "char(3)",
    "numeric(p,s)": "numeric(10,2)",
    "enums": "mood",
}
TYPES_PAGE = Path(__file__).parents[3] / "docs" / "types.md"


def test_the_types_page_says_what_check_says(postgres_dsn: NewDatabase, tmp_home: Path) -> None:
    """Of each type that the page names: whether its column is text in the lake."""
    page, _, _ = TYPES_PAGE.read_text().partition("## Keys")
    rows = re.findall(r"^\| (`.*) \| (.*) \|$", page, re.MULTILINE)
    kept = {t: "Postgres's text form" in there for types, there in rows for t in typed(types)}
    assert len(kept) >= 25
    columns = ", ".join(f'"{n}" {COLUMNS.get(t, t)}' for n, t in enumerate(kept))
    ready = made(
        postgres_dsn,
        f"create type mood as enum ('good'); create table t (id int primary key, {columns})",
    )
    said = found(config_of(ready, "t"))["text_columns"].message
    text = {t for n, t in enumerate(kept) if re.search(rf'[ :]"{n}" \(', said)}
    assert text == {t for t, is_text in kept.items() if is_text}


def typed(cell: str) -> list[str]:
    return [*re.findall(r"`([^`]+)`", cell.partition(", p ≤")[0]), *(["enums"] * ("enums" in cell))]
