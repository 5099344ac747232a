"""What the materializer's sensor asks for in quiet times."""

from __future__ import annotations

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
