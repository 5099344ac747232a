"""Claims of chunks: nobody's twice, whoever hangs, dies or comes back late."""

from __future__ import annotations

import time

import pytest

from cdc_assets.log.copies import claims
from cdc_assets.log.copies.chunks import chunks
from cdc_assets.log.copies.claims import Claims, ClaimScope, Written
from cdc_assets_tests.integration.snapshot.sources import T, chunk_keys
from cdc_assets_tests.support.lake import Lake
from cdc_assets_tests.support.waiting import wait_for

pytestmark = pytest.mark.spark


def scope(source: Lake) -> ClaimScope:
    row = source.row(T)
    assert row.pin is not None
    return ClaimScope(
        source.pipeline.source_dsn, "_pg2iceberg", "src", str(T), row.epoch, row.pin, workers=2
    )


def test_two_workers_never_hold_the_same_chunk(source: Lake) -> None:
    source.pin()
    one, two = Claims(scope(source), "one"), Claims(scope(source), "two")
    try:
        held: list[str] = []
        while True:
            mine, yours = one.take(), two.take()
            if not mine and not yours:
                break
            for worker, taken in ((one, mine), (two, yours)):
                held += [chunk.key for chunk in taken]
                assert worker.wrote([Written(chunk.key, 1, 1, 0.0) for chunk in taken], None)
        assert sorted(held) == chunk_keys(source)
    finally:
        one.close()
        two.close()


def test_a_claim_ends_with_the_session_of_its_worker(source: Lake) -> None:
    source.pin()
    gone = Claims(scope(source), "gone")
    taken = [chunk.key for chunk in gone.take()]
    other = Claims(scope(source), "other")
    try:
        assert not {chunk.key for chunk in other.take()} & set(taken)
        gone.close()
        again: list[str] = []

        def taken_over() -> bool:
            again.extend(chunk.key for chunk in other.take())
            return set(taken) <= set(again)

        wait_for(taken_over)
    finally:
        other.close()


def test_a_worker_that_comes_back_late_is_fenced(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.pin()
    monkeypatch.setattr(claims, "HEARTBEAT_SECONDS", 3600.0)  # it hangs
    late, other = Claims(scope(source), "late"), Claims(scope(source), "other")
    try:
        taken = late.take()
        source.execute(
            "update _pg2iceberg.snapshot_progress set heartbeat_at = now() - interval '31 seconds'"
            " where state = 'claimed'"
        )
        assert [chunk.key for chunk in other.take()] == [chunk.key for chunk in taken]
        assert not late.wrote([Written(chunk.key, 1, 1, 0.0) for chunk in taken], "file:///late")
        assert other.wrote([Written(chunk.key, 2, 2, 0.0) for chunk in taken], None)
        found = {c.key: c for c in chunks(source.pipeline.store, T, 1)}
        assert {found[chunk.key].rows for chunk in taken} == {2}
    finally:
        late.close()
        other.close()


def test_a_heartbeat_keeps_a_claim(source: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    source.pin()
    monkeypatch.setattr(claims, "HEARTBEAT_SECONDS", 0.2)
    worker, other = Claims(scope(source), "slow"), Claims(scope(source), "other")
    try:
        taken = worker.take()
        source.execute(
            "update _pg2iceberg.snapshot_progress set heartbeat_at = now() - interval '29 seconds'"
            " where state = 'claimed'"
        )
        time.sleep(1.5)
        assert not {chunk.key for chunk in other.take()} & {chunk.key for chunk in taken}
    finally:
        worker.close()
        other.close()
