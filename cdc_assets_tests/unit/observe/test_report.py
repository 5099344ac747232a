"""The report's parts that aren't a table's."""

from __future__ import annotations

from cdc_assets.observe.report import _lake_names
from cdc_assets.observe.status import TableStatus


def told(*names: tuple[str, str]) -> str:
    return _lake_names([TableStatus(name, lake, "streaming") for name, lake in names])


def test_who_asks_for_a_table_in_the_lake_is_told_its_name_there() -> None:
    plain = ("public.t", "app.t"), ('public."a.b"', "app.a.b"), ('public."Mixed"', "app.Mixed")
    assert told(*plain) == "the tables of app"
    other = ("sales.t", "mart.sales_t")
    assert told(*plain, other) == "the tables of app, mart; sales.t is mart.sales_t"
    many = told(*((f"public.t{n}", f"app.eu_t{n}") for n in range(25)))
    assert "public.t19 is app.eu_t19; and 5 more have other names" in many
