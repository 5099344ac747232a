"""Backfills of a small table, some of whose rows are damaged in the lake."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from cdc_assets.backfill import apply as applying
from cdc_assets.backfill import carry_out as carrying
from cdc_assets.backfill import reader
from cdc_assets.backfill import round as rounds
from cdc_assets.backfill.carry_out import carry_out
from cdc_assets.backfill.request import request
from cdc_assets.lake.spark.session import SUMMARY_OPTION
from cdc_assets.log.backfills import Backfill
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support.lake import Lake
from cdc_assets_tests.support.synchronous import hanging_commits

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


def lose(monkeypatch: pytest.MonkeyPatch, source: Lake, postgres: str) -> None:
    """A backfill whose rows are read while the COMMIT of a change of one hangs."""
    for session in (source.source, source.pipeline.store.connection):
        session.execute("set synchronous_commit = local")
    with ExitStack() as stack:
        read = reader.Readers

        def hanging(*about: Any) -> Any:
            stack.enter_context(hanging_commits(postgres, "update t set v = 'new' where id = 7"))
            return read(*about)

        monkeypatch.setattr(carrying, "Readers", hanging)
        number = request(source.pipeline, T).number

        def told(what: str) -> None:
            if what.startswith("it waits for transactions"):  # to read what the change left out
                stack.close()

        done = carried_out(source, number, on_progress=told)
        assert done.state == "done" and done.read == 300
    source.catch_up(T)
