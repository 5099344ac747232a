"""Figures of copies, merges and care at the flusher's endpoint, whichever process did them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from cdc_assets.flusher.report import looks, reporter
from cdc_assets.maintenance.run import maintain
from cdc_assets.materializer import drain as drain_module
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.slots import current_lsn
from cdc_assets.process.home import home
from cdc_assets_tests.support.flusher import flushing, start_flusher
from cdc_assets_tests.support.lake import Lake, NewLake
from cdc_assets_tests.support.metrics import free_port, scraped
from cdc_assets_tests.support.waiting import wait_for

pytestmark = pytest.mark.spark

T = TableId("public", "t")
TOTALS = ("work_total", "work_rows_total", "work_bytes_total", "work_seconds_total")
SETUP = """
create table t (id int primary key, v text);
insert into t select i, 'v' from generate_series(1, 1000) i;
"""


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each scrape has a look of its own."""
    monkeypatch.setattr(looks, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(reporter, "PROBE_SECONDS", 0.1)


@contextmanager
def streaming(source: Lake) -> Iterator[None]:
    with flushing(source.config) as progress:
        wait_for(lambda: progress.state == "streaming")
        end = current_lsn(source.source)
        wait_for(lambda: progress.flushed >= end)
        yield


def scrape(source: Lake) -> dict[tuple[str, ...], float]:
    port = source.config.metrics.port
    assert port is not None
    return scraped(port, source.config.name)


def work(found: dict[tuple[str, ...], float], kind: str, outcome: str) -> tuple[float, ...]:
    """Count and rows."""
    return found["work_total", kind, outcome], found["work_rows_total", kind, outcome]


def totals(found: dict[tuple[str, ...], float]) -> dict[tuple[str, ...], float]:
    return {key: value for key, value in found.items() if key[0] in TOTALS}


def scrape_of_a_new_process(source: Lake) -> dict[tuple[str, ...], float]:
    path = home() / "source.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(source.config.dump())
    flusher = start_flusher(path)
    try:

        def there() -> bool:
            try:
                return scrape(source)["coordination_up",] == 1
            except OSError:
                return False

        wait_for(there)
        return scrape(source)
    finally:
        assert flusher.stdin is not None
        flusher.stdin.close()
        flusher.wait(60)


@pytest.mark.usefixtures("at_once")
def test_what_any_process_does_is_counted_and_stays(
    new_lake: NewLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"metrics": {"port": free_port()}}
    with new_lake(SETUP, "t", **settings) as source:
        source.pin()
        source.flush()
        with streaming(source):
            found = scrape(source)
            assert found["coordination_up",] == 1
            assert found["tables", "copying"] == 1
            assert found["pins", "snapshot"] == 1
            assert found["pin_age_seconds", "snapshot"] > 0
            assert found["copy_chunks",] == 1
            assert found["copy_chunks_done",] == 0
            assert ("lag_seconds",) not in found
        source.copy()
        with streaming(source):
            found = scrape(source)
            assert found["tables", "streaming"] == 1
            assert found["pins", "snapshot"] == 0
            assert found["copy_chunks_done",] == 1
            assert work(found, "copy", "done") == (1, 1000)
            assert work(found, "merge", "done") == (0, 0)

            source.execute("update t set v = 'w' where id <= 10")
            wait_for(lambda: scrape(source)["backlog_rows",] == 10)
            found = scrape(source)
            assert found["backlog_entries",] == 1
            assert found["backlog_bytes",] > 0
            assert found["lag_seconds",] >= found["backlog_oldest_seconds",] * 0.9 > 0
            source.drain(T)
            found = scrape(source)
            assert found["backlog_rows",] == found["backlog_entries",] == 0
            assert work(found, "merge", "done") == (1, 10)
            assert found["work_bytes_total", "merge", "done"] > 0
            assert 0 < found["work_seconds_total", "merge", "done"] < 300

            def broken(_: object) -> None:
                raise RuntimeError("no merge today")

            source.execute("update t set v = 'x' where id <= 20")
            source.flush()
            with monkeypatch.context() as patched:
                patched.setattr(drain_module, "merge", broken)
                with pytest.raises(RuntimeError, match="no merge today"):
                    source.drain(T)
            found = scrape(source)
            assert work(found, "merge", "failed") == (1, 0)
            assert work(found, "merge", "done") == (1, 10)
            assert found["backlog_rows",] == 20
            source.drain(T)

            assert work(scrape(source), "maintenance", "done") == (0, 0)
            done = list(maintain(source.pipeline, lambda: source.session, [T]))
            assert [one.problem for one in done] == [None]
            found = scrape(source)
            assert work(found, "maintenance", "done") == (1, 0)
            assert found["maintenance_idle_seconds",] < 60
        again = scrape_of_a_new_process(source)
        assert totals(again) == totals(found)


@pytest.mark.usefixtures("at_once")
def test_a_copy_that_fails_is_counted(new_lake: NewLake) -> None:
    with new_lake(SETUP, "t", metrics={"port": free_port()}) as source:
        source.pin()
        source.execute("alter table t rename to other")
        with pytest.raises(Exception, match="t"):
            source.copy()
        counted = source.pipeline.store.connection.execute(
            "select kind, outcome, count from work_done"
        ).fetchall()
        assert counted == [("copy", "failed", 1)]
