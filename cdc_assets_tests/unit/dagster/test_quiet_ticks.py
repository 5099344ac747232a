"""What the materializer's sensor asks for and says where nothing is to be merged."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from cdc_assets.config.source import parse_config
from cdc_assets.dagster.names import TableAssets
from cdc_assets.dagster.sensors import materializer
from cdc_assets.observe.status import TableStatus
from cdc_assets.postgres.names import TableId


def test_no_run_is_asked_for_in_quiet_times() -> None:
    around = [datetime.now(UTC) + timedelta(hours=hours) for hours in (-1, 1)]
    quiet = "-".join(f"{at:%H:%M}" for at in around)
    status = TableStatus(
        *("public.t", "src.t", "streaming", None, 1, "0/1", "0/10", 0, 0.0, 3, 1, 1, 1)
    )
    for windows, asked in (([], 1), ([quiet], 0)):
        freshness = {"quiet": windows, "warn": "4h", "fail": "8h"}
        config = parse_config(
            {
                "name": "src",
                "postgres": {"dsn": "postgresql://nowhere/db"},
                "tables": [{"name": "t", "freshness": freshness}],
            },
            "test",
        )
        look = materializer.Look(TableAssets(config, TableId("public", "t")), status, 5.0)
        assert len(materializer.to_merge([look], active=False, proven=True)) == asked


def test_a_quiet_table_gets_a_heartbeat_or_a_run_for_its_mark_unless_others_changed_it() -> None:
    given = {"name": "src", "postgres": {"dsn": "postgresql://nowhere/db"}, "tables": ["t"]}
    names = TableAssets(parse_config(given, "test"), TableId("public", "t"))
    status = TableStatus(
        *("public.t", "src.t", "streaming", None, 1, "0/1", "0/10", 0, 0.0, 0, 1, 1, 1)
    )
    level = materializer.Look(names, status, 3_600.0)
    held_up = replace(level, status=replace(status, problem="somebody else changed it"))
    assert materializer.due([level], proven=True) == [level]
    assert materializer.to_merge([level], active=False, proven=True) == ()
    marked = replace(level, marked=True)  # nothing of it waits, but a mark waits for it
    assert materializer.to_merge([marked], active=False, proven=False) == (names,)
    assert materializer.due([held_up], proven=True) == []
    said = materializer._sentence([level, held_up], active=False, waits=False, proven=True)
    assert said == "somebody else changed it"
