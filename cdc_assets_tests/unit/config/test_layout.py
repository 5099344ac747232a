"""Partitions and orders as the configuration spells them."""

from __future__ import annotations

import pytest

from cdc_assets.config.layout import Part, parse_order, parse_part
from cdc_assets.config.tables import TableConfig


@pytest.mark.parametrize(
    ("text", "column", "transform", "sql"),
    [
        ("region", "region", "identity", "`region`"),
        ("`odd, (name)`", "odd, (name)", "identity", "`odd, (name)`"),
        ("days(created_at)", "created_at", "day", "day(`created_at`)"),
        ("Hour( `At``x` )", "At`x", "hour", "hour(`At``x`)"),
        ("bucket(16, id)", "id", "bucket[16]", "bucket(16, `id`)"),
        ("bucket(id, 16)", "id", "bucket[16]", "bucket(16, `id`)"),
        ("truncate(4, v)", "v", "truncate[4]", "truncate(4, `v`)"),
    ],
)
def test_a_transform_is_read_as_spark_reads_it(
    text: str, column: str, transform: str, sql: str
) -> None:
    part = parse_part(text)
    assert (part, part.sql) == (Part(column, transform), sql)


def test_an_order_is_read_as_spark_reads_it() -> None:
    assert parse_order("id").sql == "`id` asc nulls first"
    assert parse_order("created_at DESC").sql == "`created_at` desc nulls last"
    assert parse_order("`a b` asc nulls last").sql == "`a b` asc nulls last"


@pytest.mark.parametrize(
    "text", ["", "week(at)", "bucket(id)", "day(3, at)", "day(at", "a b", "f(g(x))"]
)
def test_what_is_no_transform_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=r"isn't a partition transform; write a column, year\(c\)"):
        TableConfig(name="public.t", partition_by=(text,))


def test_what_is_no_order_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'id down' isn't an order"):
        TableConfig(name="public.t", sort_by=("id down",))
