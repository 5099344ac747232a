"""Copies beside a follower: which tables, and how often those that fail."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import nullcontext
from threading import Event
from typing import Any, cast

import pytest

from cdc_assets.errors import CdcError, TableProblem
from cdc_assets.operations import copying_beside as module
from cdc_assets.postgres.names import TableId
from cdc_assets.process.backoff import Backoff
from cdc_assets_tests.integration.pins.pinning import PLAIN, T, U, pinning
from cdc_assets_tests.support.flusher import Bench


def test_a_table_that_fails_makes_no_other_wait(
    source: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried = dict[TableId, int]()

    def copy_tables(
        _: object, __: object, tables: Iterable[TableId], **___: Any
    ) -> dict[TableId, CdcError]:
        for table in tables:
            tried[table] = tried.get(table, 0) + 1
        return {T: TableProblem(T, "it can't be read")} if T in tables else {}

    monkeypatch.setattr(module, "copy_tables", copy_tables)
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(module, "_BACKOFF", Backoff(first_seconds=0.3, cap_seconds=60.0))
    setup = f"{PLAIN}; create table u (id int primary key); insert into u values (1)"
    with pinning(source, setup, "t", "u", mode="initial") as here:
        session: Any = nullcontext
        with module.copying_beside(here.config, [T, U], session, lambda _: None):
            time.sleep(5)
    assert 2 < tried[T] < 8
    assert tried[U] > 12, "each look: it is never complete here"
    said = [text for text in caplog.messages if "it can't be read" in text]
    assert len(said) == 1


def test_a_table_that_comes_does_not_wait_for_a_large_one(
    source: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, come, over, tried = Event(), Event(), Event(), list[TableId]()

    def copy_tables(
        _: object, __: object, tables: Iterable[TableId], **___: Any
    ) -> dict[TableId, CdcError]:
        tried.extend(tables)
        (large if T in tables else come).set()
        assert over.wait(20)
        return {}

    monkeypatch.setattr(module, "copy_tables", copy_tables)
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.1)
    setup = f"{PLAIN}; create table u (id int primary key)"
    with pinning(source, setup, "t", "u", mode="initial") as here:
        session, wanted = nullcontext, [T]
        with module.copying_beside(here.config, wanted, cast("Any", session), lambda _: None):
            assert large.wait(20)
            wanted.append(U)
            assert come.wait(20)
            time.sleep(1)  # neither is taken up by the other thread
            over.set()
    assert tried[:2] == [T, U]
