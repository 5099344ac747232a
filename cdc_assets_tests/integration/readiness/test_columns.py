"""What ``check`` says of columns before anything is copied."""

from __future__ import annotations

from pathlib import Path

import psycopg

from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.integration.readiness.test_check import config_of, found


def test_what_becomes_of_odd_columns_is_said_before_anything_is_copied(
    postgres_dsn: NewDatabase, tmp_home: Path
) -> None:
    """As the page on types has it."""
    ready = postgres_dsn()
    with psycopg.connect(ready, autocommit=True) as source:
        source.execute(
            "create table odd (at timestamptz primary key, doc jsonb, price numeric(10,2),"
            " loose numeric, tags text[], until date, plain int, hidden interval)"
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
