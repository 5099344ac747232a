"""What scripts read in ``status --json``: every key, whatever there is to say."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime

import pytest

from cdc_assets.log.locks import LockWait
from cdc_assets.log.sessions.flusher_status import ActiveFlusher, FlusherStatus, state_of
from cdc_assets.log.sessions.workers import KnownWorker
from cdc_assets.observe.figures.replay import ReplayStatus
from cdc_assets.observe.status import PinStatus, SourceStatus, TableStatus
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.session.waits import Wait
from cdc_assets.postgres.slots import SlotStatus

T = TableId("public", "t")
NEW: dict[str, object] = {
    "name": "public.t",
    "lake_table": "shop.t",
    "state": "new",
    "reason": None,
    "epoch": 0,
    "snapshot_lsn": None,
    "applied_lsn": None,
    "lag_bytes": None,
    "lag_seconds": None,
    "pending_rows": 0,
    "chunks_done": 0,
    "chunks_total": 0,
    "rows_copied": 0,
    "copy_rows_per_second": None,
    "copy_seconds_left": None,
    "altered": False,
    "worker": None,
    "paused_since": None,
    "applied_offset": 0,
    "copy_idle_seconds": None,
    "info": [],
    "problem": None,
    "problem_seconds": None,
}


def test_the_keys_of_json_before_the_first_start() -> None:
    tables = (TableStatus("public.t", "shop.t", "new"),)
    status = SourceStatus("shop", tables, "cdc_shop", None, FlusherStatus("down"), {"catalog": {}})
    assert json.loads(json.dumps(status.to_json())) == {
        "source": "shop",
        "tables": [NEW],
        "slot": {
            "name": "cdc_shop",
            "exists": False,
            "active": False,
            "confirmed_flush_lsn": None,
            "retained_bytes": 0,
            "wal_status": None,
        },
        "flusher": {
            "active": False,
            "state": "down",
            "flushed_lsn": None,
            "flushed_seconds_ago": None,
            "lag_bytes": None,
            "told_seconds_ago": None,
        },
        "lake": {"catalog": {}},
        "workers": [],
        "waits": [],
        "pins": [],
        "lock_waits": [],
        "left": [],
        "dropped": [],
        "backfills": [],
        "standby": None,
        "groups": [],
        "log_of": None,
    }


def test_the_keys_of_json_while_everything_runs() -> None:
    at, worker = datetime(2026, 1, 1, tzinfo=UTC), uuid.uuid4()
    status = SourceStatus(
        "shop",
        (),
        "cdc_shop",
        SlotStatus("cdc_shop", "pgoutput", 7, Lsn(256), "reserved", 9),
        FlusherStatus("streaming", True, Lsn(256), 1.0, 5, 2.0, {"state": "old", "lag_bytes": 9}),
        {},
        (KnownWorker(worker, "process 1", frozenset(), at, 1.0, True, {T: 3}),),
        (Wait("pin", "table t", 1.0, ("pid 7",)),),
        (PinStatus(("public.t",), 1.0, 2),),
        (LockWait("pins", "session 8", None),),
        standby=ReplayStatus(12, 3.0, paused=False, connected=True),
    )
    found = json.loads(json.dumps(status.to_json()))
    assert found["slot"] == {
        "name": "cdc_shop",
        "exists": True,
        "active": True,
        "confirmed_flush_lsn": "0/100",
        "retained_bytes": 9,
        "wal_status": "reserved",
    }
    assert found["standby"] == {
        "behind_bytes": 12,
        "behind_seconds": 3.0,
        "paused": False,
        "connected": True,
    }
    assert found["flusher"] == {
        "active": True,
        "state": "streaming",
        "flushed_lsn": "0/100",
        "flushed_seconds_ago": 1.0,
        "lag_bytes": 5,
        "told_seconds_ago": 2.0,
    }
    assert found["workers"] == [
        {
            "worker": str(worker),
            "process": "process 1",
            "started_at": "2026-01-01T00:00:00+00:00",
            "heard_seconds_ago": 1.0,
            "alive": True,
            "tables": {"public.t": 3},
        }
    ]
    assert found["pins"] == [{"tables": ["public.t"], "seconds": 1.0, "xmin_age": 2}]
    assert found["lock_waits"] == [{"lock": "pins", "session": "session 8", "holder": None}]
    assert [sorted(wait) for wait in found["waits"]] == [
        ["holders", "seconds", "session", "waits_for"]
    ]


YOUNG, OLD = ActiveFlusher("p", 2.0, 1.0), ActiveFlusher("p", 99.0, 1.0)


@pytest.mark.parametrize(
    ("active", "told", "state"),
    [
        (None, None, "down"),
        (None, "streaming", "down"),
        (None, "reconnecting", "reconnecting"),
        (None, "stuck", "stuck"),
        (OLD, "streaming", "streaming"),
        (OLD, None, "silent"),
        (YOUNG, None, "starting"),
        (YOUNG, "stopped", "starting"),  # its predecessor's report
        (YOUNG, "reconnecting", "reconnecting"),
        (ActiveFlusher("session 7"), None, "silent"),
    ],
)
def test_how_a_flusher_is(active: ActiveFlusher | None, told: str | None, state: str) -> None:
    assert state_of(active, told) == state


def test_an_active_flusher_that_is_not_heard_of() -> None:
    assert not YOUNG.is_silent
    assert ActiveFlusher("p", 99.0, 31.0).is_silent
    assert not ActiveFlusher("session 7").is_silent
