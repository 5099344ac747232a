"""Backfills of a small table, some of whose rows are damaged in the lake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cdc_assets.backfill import apply as applying
from cdc_assets.backfill import round as rounds
from cdc_assets.backfill.carry_out import carry_out
from cdc_assets.backfill.request import request
from cdc_assets.lake.spark.session import SUMMARY_OPTION
from cdc_assets.log.backfills import Backfill
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support.lake import Lake

SETUP = """
create table t (id int primary key, v text, big text);
alter table t alter big set storage external;
insert into t select i, 'v' || i, repeat('long ', 500) || i from generate_series(1, 300) i;
"""
T = TableId("public", "t")


def damage(source: Lake, *statements: str) -> None:
    """Spoil rows of ``T`` in the lake, as if merges of ours had."""
    lake = source.lake_table(T)
    cursor = lake.state().cursor
    assert cursor is not None
    for statement in statements:
        source.session.sql(statement)
    writer = source.session.table(lake.sql_name).limit(0).writeTo(lake.sql_name)
    for key, value in lake.reached(cursor).items():
        writer = writer.option(SUMMARY_OPTION + key, value)
    writer.append()
    assert lake.state().foreign is None


def carried_out(source: Lake, number: int, **how: Any) -> Backfill:
    def flush_to(lsn: object, *, seconds: float | None = None) -> None:
        source.flush()

    how = {"on_progress": print, **how}
    return carry_out(source.pipeline, source.session, number, flush_to, **how)


def backfilled(source: Lake, table: TableId = T, where: str | None = None, **how: Any) -> Backfill:
    return carried_out(source, request(source.pipeline, table, where, **how).number)


def after_reading(monkeypatch: pytest.MonkeyPatch, do: Callable[[], object]) -> None:
    """Once, after rows were read and before they are applied."""
    applied, todo = applying.apply, [do]

    def apply(*about: Any) -> Any:
        while todo:
            todo.pop()()
        return applied(*about)

    monkeypatch.setattr(rounds, "apply", apply)
