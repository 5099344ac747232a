"""What is proven of a log, and of tables that are polled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from cdc_assets.config.source import parse_config
from cdc_assets.dagster.sensors import materializer, proof
from cdc_assets.dagster.sensors.pace import PACE_SECONDS
from cdc_assets.observe.status import SourceStatus
from cdc_assets.postgres.lsn import Lsn


def test_polls_that_are_far_apart_prove_that_their_tables_are_level(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of four minutes was missed by one tick in five, and its tables looked late."""
    config = parse_config(
        {
            "name": "src",
            "postgres": {"dsn": "postgresql://h/d"},
            "query": {"every": "4m"},
            "tables": [{"name": "t", "watermark": {"column": "updated_at"}}],
        },
        "test",
    )
    proven = set[int]()
    monkeypatch.setattr(materializer, "_ends", {})
    for tick in range(100):
        now = 1000.0 + tick * PACE_SECONDS
        poll = now // 240
        status = SimpleNamespace(name="public.t", applied_lsn="0/0", lag_bytes=int(now * 1000))
        flushed = Lsn(int(poll * 240_000))
        found = SimpleNamespace(flusher=SimpleNamespace(flushed_lsn=flushed), tables=[status])
        monkeypatch.setattr("time.monotonic", lambda now=now: now)
        if materializer._is_proven(config, cast("SourceStatus", found)):
            proven.add(int(poll))
        ahead = SimpleNamespace(**vars(status) | {"applied_lsn": str(Lsn(int(now * 1000)))})
        found.tables = [ahead]
        end, _ = materializer._ends["src"]
        assert proof.level_tables(config, cast("SourceStatus", found), end) == {"public.t"}
    assert proven == set(range(5, 10))


def test_the_log_is_level_once_it_reaches_where_the_wal_ended() -> None:
    assert proof.reaches(Lsn(0x2000), Lsn.parse("0/2000"))
    assert proof.reaches(Lsn(0x2000), Lsn.parse("0/2018"))  # a page's header, no transaction
    assert not proof.reaches(Lsn(0x2000), Lsn.parse("0/2030"))
    assert not proof.reaches(None, Lsn.parse("0/2000"))
    assert not proof.reaches(Lsn(0x2000), None)
