"""What is wrong with a value, in the words of somebody who writes YAML."""

from __future__ import annotations

from typing import Any

import pytest

from cdc_assets.config.source import parse_config
from cdc_assets.errors import ConfigurationError

A_LIST = "write a list, in brackets or with a dash before each"
AN_ENTRY = "write a table's name, or a mapping with its name"
LEAST = {"name": "a", "postgres": {"dsn": "postgresql://h/db"}, "tables": ["t"]}


def table(**settings: Any) -> dict[str, Any]:
    return {"tables": [{"name": "t", **settings}]}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tables": "public.orders"}, f"tables: {A_LIST}."),
        ({"tables": None}, f"tables: {A_LIST}."),
        ({"exclude": "public.t"}, f"exclude: {A_LIST}."),
        (
            {"tables": ["t", 3]},
            f"tables[entry 2]: {AN_ENTRY}.",
        ),
        ({"tables": [["t"]]}, f"tables[entry 1]: {AN_ENTRY}."),
        ({"lake": ["a"]}, "lake: write a mapping of its keys to values."),
        ({"maintenance": None}, "maintenance: write a mapping of its keys to values."),
        (table(columns={"mask": ["a"]}), "tables[t].columns.mask: write a mapping, like {a: b}."),
        ({"name": 3}, "name: write text; a number is text in quotes."),
        (table(columns={"rename": {"a": 1}}), "tables[t].columns.rename.a: write text; a number"),
        (table(only="maybe"), "tables[t].only: write true or false."),
        (table(only=3.5), "tables[t].only: write true or false."),
        (table(chunk_pages="x"), "tables[t].chunk_pages: write a whole number."),
        (table(chunk_pages=1.5), "tables[t].chunk_pages: write a whole number."),
        (table(chunk_pages=0), "tables[t].chunk_pages: it should be greater than or equal to 1."),
        (
            {"maintenance": {"keep_history": "1m"}},
            "maintenance.keep_history: it should be greater than or equal to 1h.",
        ),
        (table(mode="x"), "tables[t].mode: write 'mirror', 'soft_delete' or 'append'."),
        ({"maintenance": {"deleted_rows": "x"}}, "maintenance.deleted_rows: write a number."),
        (table(**{"as": ""}), "tables[t].as: it should have at least 1 character."),
        ({"surprise": 1}, "surprise: unknown key; remove it or correct its spelling."),
        ({"tabels": 1}, "tabels: unknown key; remove it or correct its spelling: tables?"),
        (
            table(freshnes={}),
            "tables[t].freshnes: unknown key; remove it or correct its spelling: freshness?",
        ),
        (table(a="x"), "tables[t].a: unknown key; remove it or correct its spelling."),
        (
            table(columns={"masks": {}}),
            "tables[t].columns.masks: unknown key; remove it",
        ),
        (
            {"lake": {"catalog": {"urii": "x"}}},
            "lake.catalog.urii: unknown key; remove it or correct its spelling: uri?",
        ),
        ({"freshness": 1}, "freshness: unknown key; remove it or correct its spelling."),
        ({"tables": []}, "tables: name at least one, or a pattern like public.*."),
    ],
)
def test_a_wrong_value(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        parse_config({**LEAST, **changes}, "a.yaml")
    assert str(error.value).startswith(f"a.yaml: {said}")
