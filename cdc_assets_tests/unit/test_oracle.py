"""The random oracle's own parts: an oracle that accepts everything proves nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from cdc_assets_tests.oracle.generate import FOCUSES, make
from cdc_assets_tests.oracle.judge import Evidence, judge
from cdc_assets_tests.oracle.plan import Plan, Table
from cdc_assets_tests.oracle.record import Change, Transaction
from cdc_assets_tests.oracle.shrink import shrink, without_column
from cdc_assets_tests.oracle.values import in_lake, record_items, shown

Rows = Sequence[Mapping[str, Any]]


def _image(key: int, value: str) -> dict[str, str | None]:
    return {"id": str(key), "v": value}


# Row 1 is copied, changed and deleted, 2 is copied, 3 is inserted later, 4 becomes 5.
HISTORY = [
    Transaction(
        10, 1, tuple(Change(0, "I", None, _image(k, v)) for k, v in ((1, "a"), (2, "b"), (4, "d")))
    ),
    Transaction(20, 2, (Change(0, "U", _image(1, "a"), _image(1, "x")),)),
    Transaction(
        30, 3, (Change(0, "D", _image(1, "x"), None), Change(0, "I", None, _image(3, "c")))
    ),
    Transaction(40, 4, (Change(0, "U", _image(4, "d"), _image(5, "d")),)),
]
SOURCE = [_image(2, "b"), _image(3, "c"), _image(5, "d")]
MIRROR: Rows = [{"id": 2, "v": "b"}, {"id": 3, "v": "c"}, {"id": 5, "v": "d"}]
SOFT: Rows = [
    *({**row, "_deleted_at": None} for row in MIRROR),
    {"id": 1, "v": "x", "_deleted_at": "t"},
    {"id": 4, "v": "d", "_deleted_at": "t"},
]


def _logged(op: str, lsn: int, xid: int | None, key: int, value: str | None) -> dict[str, Any]:
    return {"_op": op, "_lsn": lsn, "_xid": xid, "id": key, "v": value}


APPEND: Rows = [
    *(_logged("I", 15, None, key, value) for key, value in ((1, "a"), (2, "b"), (4, "d"))),
    _logged("U", 16, 2, 1, "x"),
    _logged("D", 21, 3, 1, None),
    _logged("I", 22, 3, 3, "c"),
    _logged("D", 35, 4, 4, None),
    _logged("U", 35, 4, 5, "d"),
]


def _judged(mode: str, lake: Rows) -> list[str]:
    table = Table("public", "t", {"id": "integer", "v": "text"}, ["id"], settings={"mode": mode})
    kinds = {"id": "integer", "v": "text"}
    return judge(Evidence(0, table, kinds, SOURCE, HISTORY, 15, lake, list(lake[0])))


@pytest.mark.parametrize(
    ("mode", "lake"), [("mirror", MIRROR), ("soft_delete", SOFT), ("append", APPEND)]
)
def test_what_is_right_passes_and_each_row_counts(mode: str, lake: Rows) -> None:
    assert _judged(mode, lake) == []
    for at in range(len(lake)):
        assert _judged(mode, [*lake[:at], *lake[at + 1 :]]), f"without row {at}"
        assert _judged(mode, [*lake, lake[at]]), f"row {at} twice"
        assert _judged(mode, [*lake[:at], {**lake[at], "v": "?"}, *lake[at + 1 :]]), f"row {at}"


def test_a_transaction_in_another_order_is_noticed() -> None:
    turned = [{**row, "_lsn": 100 - row["_lsn"]} if row["_xid"] == 3 else row for row in APPEND]
    assert "order" in _judged("append", turned)[0]


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("integer", "-7", -7),
        ("real", "0.1", 0.10000000149011612),
        ("date", "0044-03-15 BC", None),
        (
            "timestamp with time zone",
            "2024-01-01 00:00:00.5+00",
            "2024-01-01 00:00:00.500000+00:00",
        ),
        ("bytea", "\\x00ff", b"\x00\xff"),
        ("text[]", '{a,"b \\" c",NULL,"NULL"}', ["a", 'b " c', None, "NULL"]),
        ("integer[]", "{{1},{2}}", None),
        ("integer[]", "[0:1][0:0]={{1},{2}}", None),
        ("integer[]", "[0:1]={1,NULL}", [1, None]),
        ("uuid[]", "{x}", "{x}"),
        ("numeric(4,2)", "1.50", "1.50"),
    ],
)
def test_values_as_the_lake_shows_them(kind: str, text: str, value: object) -> None:
    found = in_lake(kind, text, "null")
    assert shown(found) in (shown(value), value)


def test_a_key_may_be_text_where_a_value_does_not_fit() -> None:
    def judged(day: str) -> list[str]:
        table = Table("public", "t", {"day": "date"}, ["day"])
        source: list[dict[str, str | None]] = [{"day": "2024-01-01"}]
        history = [Transaction(10, 1, (Change(0, "I", None, {"day": day}),))]
        lake = [{"day": "2024-01-01"}]
        return judge(Evidence(0, table, {"day": "date"}, source, history, 5, lake, ["day"]))

    assert judged("infinity") == []
    assert judged("2024-01-01") == ["text keys: ['day'] are text, and every value would fit"]


def test_records_are_read_as_postgres_writes_them() -> None:
    assert record_items('(1,,"","a ""b"" \\\\ ,)",x)') == ["1", None, "", 'a "b" \\ ,)', "x"]


def test_a_seed_is_a_plan_that_can_be_written_down() -> None:
    for focus in ("", *FOCUSES):
        plans = [make(seed, focus) for seed in range(20)]
        assert [make(seed, focus) for seed in range(20)] == plans
        assert [Plan.parse(plan.dump()) for plan in plans] == plans


def test_shrinking_keeps_what_makes_it_fail() -> None:
    def fails(plan: Plan) -> bool:
        names = [table.name for table in plan.tables]
        return wanted in names and any(action["do"] == "copy" for action in plan.actions)

    plan = next(p for p in map(make, range(50)) if len(p.tables) == 4)
    wanted = plan.tables[2].name
    small = shrink(plan, fails, lambda: False)
    assert [table.name for table in small.tables] == [wanted]
    assert [action["do"] for action in small.actions] == ["copy"]
    left = small.tables[0]
    assert len(left.columns) == max(1, len(left.key) + len(left.required))


def test_a_column_goes_from_everything_that_names_it() -> None:
    plan = make(3)
    table = plan.tables[0]
    column = next(c for c in table.columns if c not in table.key)
    small = without_column(plan, 0, column)
    assert f'"{column}"' not in "".join(small.tables[0].create())
    statements = [s for t in small.actions[0]["transactions"] for s in t["statements"]]
    assert all(column not in row for s in statements if s["t"] == 0 for row in s.get("rows", ()))
