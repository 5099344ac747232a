"""The condition under which a row of the lake has a key of the batch."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc_assets.config.source import parse_config
from cdc_assets.lake.tables import LakeTable
from cdc_assets.log.states import TableState
from cdc_assets.log.table_row import TableRow
from cdc_assets.materializer.actions import keys
from cdc_assets.postgres.catalog import Column
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId

T = TableId("public", "t")
JOINED: Any = object()
BETWEEN = "t.`id` between "


def condition(monkeypatch: pytest.MonkeyPatch, types: dict[str, str], *rows: str) -> str:
    """For rows of keys, each a text with a value a column; begins with ``join:`` if it is one."""
    settings = {"postgres": {"dsn": "postgresql://h"}, "tables": [{"name": "t"}]}
    config = parse_config({"name": "src", **settings}, "test")
    columns = tuple(Column(name, kind, n) for n, (name, kind) in enumerate(types.items(), 1))
    names = tuple(types)
    lsn = Lsn(1)
    row = TableRow(T, 1, 1, TableState.STREAMING, names, columns, lsn, lsn, None, None)
    structs = [dict(zip(names, text.split(), strict=True)) for text in rows]
    kind = pa.struct([(name, pa.string()) for name in names])
    table = pa.table({"key": pa.array(structs, kind)})
    monkeypatch.setattr(keys, "as_lake", lambda frame, *_: frame)
    found = keys.of_keys(LakeTable(config, config.table(T), row), table, lambda: JOINED)
    assert found.keys in (None, JOINED)
    return ("join: " if found.keys is JOINED else "") + found.condition


@pytest.mark.parametrize(
    ("types", "rows", "wanted"),
    [
        ({"id": "bigint"}, ["7", "-3", "7"], "t.`id` in (7, -3, 7)"),
        ({".n": "smallint"}, ["1"], "t.`.n` in (1)"),
        (
            {".a": "integer", "a": "integer"},
            ["1 100", "2 200"],
            (
                "join: t.`.a` = s.c0 and t.`a` = s.c1"
                " and t.`.a` between 1 and 2 and t.`a` between 96 and 207"
            ),
        ),
        (
            {"k": "text", "n": "integer"},
            ["x 5"],
            "join: t.`k` = s.c0 and t.`n` = s.c1 and t.`n` between 5 and 5",
        ),
        ({"k": "text"}, ["x"], "join: t.`k` = s.c0"),
        ({"id": "bigint"}, [], "join: t.`id` = s.c0"),
        ({"id": "integer"}, [f"{-(2**30) - 1}", "7"], "join: t.`id` = s.c0"),
        ({"id": "bigint"}, [f"{-(2**62) - 1}"], "join: t.`id` = s.c0"),
        ({"id": "integer"}, [f"{-(2**30)}"], f"t.`id` in ({-(2**30)})"),
    ],
)
def test_numbers_of_one_column_are_named_and_joined_ones_have_bounds(
    types: dict[str, str], rows: list[str], wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert condition(monkeypatch, types, *rows) == wanted


def test_named_keys_have_bounds_where_iceberg_does_not_look_for_so_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keys, "_LOOKED_FOR", 2)
    said = condition(monkeypatch, {"id": "bigint"}, "7", "-3", "5")
    assert said == "t.`id` between -4 and 7 and t.`id` in (7, -3, 5)"


def test_many_keys_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "_NAMED", 2)
    said = condition(monkeypatch, {"id": "bigint"}, "1", "2", "3")
    assert said == "join: t.`id` = s.c0 and t.`id` between 1 and 3"


# Of lower ones no bounds are told.
BIGINT = st.integers(-(2**62), 2**63 - 1)


@given(BIGINT, BIGINT)
def test_told_bounds_hold_all_keys_and_little_more(one: int, other: int) -> None:
    low, high = sorted((one, other))
    told_low, _, told_high = keys.within({"id": (low, high)}).removeprefix(BETWEEN).split()
    assert -(2**62) <= int(told_low) <= low <= high <= int(told_high) < 2**63
    assert max(low - int(told_low), int(told_high) - high) <= (high - low) / 4


def test_bounds_that_moved_a_little_are_told_as_before() -> None:
    told = {keys.within({"id": (3, 1_000_000 + inserted)}) for inserted in range(0, 40_000, 1_000)}
    assert told == {BETWEEN + "0 and 1048575"}
