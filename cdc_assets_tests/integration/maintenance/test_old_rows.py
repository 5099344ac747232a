"""What a maintenance run deletes from the log, beside the entries of staged files."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cdc_assets.log.sessions.heartbeat import Heart
from cdc_assets.maintenance.staged import remove_old_rows
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.catalog import describe
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support.flusher import Bench
from cdc_assets_tests.support.waiting import wait_for


@pytest.fixture
def pipeline(source: Bench) -> Iterator[Pipeline]:
    source.execute("create table t (id int primary key, v text)")
    with Pipeline.open(source.config("t")) as found:
        found.store.add_table(describe(source.connection, TableId("public", "t")))
        yield found


def test_sessions_of_processes_that_lived_for_seconds_are_forgotten(
    source: Bench, pipeline: Pipeline
) -> None:
    """No heart has beaten while they were there."""
    heart = Heart(pipeline.config)
    alive = heart.adopt(pipeline.store)
    with Pipeline.open(pipeline.config) as brief:
        over = heart.adopt(brief.store)
    gone = "select pid from pg_stat_activity where pid = %s"
    wait_for(lambda: not source.execute(gone, over))
    remove_old_rows(pipeline.store)
    found = {pid for (pid,) in source.execute("select pid from _pg2iceberg.sessions")}
    assert alive in found
    assert over not in found


def test_pins_and_plans_of_the_past_are_forgotten(source: Bench, pipeline: Pipeline) -> None:
    source.execute(
        "insert into _pg2iceberg.pins (pin, source, consistent_point, created_at) values"
        " (gen_random_uuid(), %s, '0/1', now() - interval '2 days'),"
        " (gen_random_uuid(), %s, '0/2', now())",
        source.name,
        source.name,
    )
    source.execute("update _pg2iceberg.tables set epoch = 2")
    for epoch in (1, 2):
        source.execute(
            "insert into _pg2iceberg.snapshot_progress (source, table_name, epoch, chunk,"
            " first_block) values (%s, 'public.t', %s, 'c', 0)",
            source.name,
            epoch,
        )
    kept = source.execute("select pin from _pg2iceberg.tables")[0][0]
    assert remove_old_rows(pipeline.store) >= 2
    pins = source.execute(
        "select consistent_point::text from _pg2iceberg.pins where pin <> %s",
        kept or "00000000-0000-0000-0000-000000000000",
    )
    assert ("0/1",) not in pins
    assert ("0/2",) in pins
    assert source.execute("select epoch from _pg2iceberg.snapshot_progress") == [(2,)]
