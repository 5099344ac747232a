"""A source that can't send what is next: named, and tried ever more seldom."""

from __future__ import annotations

import pytest

from cdc_assets.flusher import flusher as main
from cdc_assets.flusher.progress import Progress
from cdc_assets.flusher.standstill import TIMES, Standstill, Stuck
from cdc_assets.flusher.stream import EndedByServer, Endless, StreamLost
from cdc_assets.observe.status import collect
from cdc_assets.operations.copying import resume
from cdc_assets.operations.drop import drop_source
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.process.backoff import Backoff
from cdc_assets_tests.support.flusher import Bench, flushing
from cdc_assets_tests.support.waiting import wait_for


@pytest.fixture
def source(source: Bench) -> Bench:
    # A value that can be written and not be printed, as one of 1 GB can't.
    source.execute("""
        create type odd;
        create function odd_in(cstring) returns odd language internal immutable strict
            as 'int4in';
        create function odd_out(odd) returns cstring language internal immutable strict
            as 'enum_out';
        create type odd (input = odd_in, output = odd_out, like = int4);
        create table t (id int primary key, v odd);
    """)
    return source


def test_a_change_that_cannot_be_sent(source: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "BACKOFF", Backoff(first_seconds=0.05))
    config = source.config("public.t", flush_interval="20ms")
    source.flush(config)
    source.execute("insert into t values (1, null)")
    with flushing(config) as progress:
        wait_for(lambda: progress.rows == 1)
        source.execute("insert into t values (2, '42')")
        wait_for(lambda: progress.state == "stuck")
        said = progress.last_error or ""
        assert "invalid internal value for enum" in said
        assert f"can't send what follows LSN {progress.flushed}" in said
        sessions = progress.sessions
        wait_for(lambda: progress.sessions > sessions)  # it goes on trying …
        wait_for(lambda: f"{TIMES + 1} times" in (progress.last_error or ""))
        assert progress.state == "stuck"  # … and doesn't seem to stream meanwhile
        with Pipeline.open(config) as pipeline:
            wait_for(lambda: collect(pipeline).flusher.state == "stuck")
    # Somebody who waits for it is told.
    with pytest.raises(Stuck, match="cdc-assets drop-source, then cdc-assets resume"):
        source.flush(config)
    with Pipeline.open(config) as pipeline:
        told, _ = pipeline.store.flusher_report() or ({}, None)
    assert (told["state"], "can't send what follows" in told["last_error"]) == ("stopped", True)
    # The way out that is named.
    with Pipeline.open(config) as pipeline:
        drop_source(pipeline)
        resume(pipeline)
    source.flush(config)
    source.execute("insert into t values (3, null)")
    source.flush(config)
    assert source.ids() == ["3"]


def test_what_is_a_standstill() -> None:
    seen, out_of_memory, other = Standstill(), EndedByServer("ERROR: out of memory"), "ERROR: other"
    lost = StreamLost("the connection was lost")

    def judged(flushed: int, error: StreamLost) -> bool:
        return isinstance(seen.judged(Lsn(flushed), error, 0), Stuck)

    same = [judged(7, out_of_memory) for _ in range(TIMES - 1)]
    assert not any(same)
    assert seen.judged(Lsn(7), lost, 0) is lost  # says nothing of the place
    assert judged(7, out_of_memory)
    assert judged(7, out_of_memory)
    assert not judged(8, out_of_memory)  # something got into the log
    assert not judged(8, EndedByServer(other))


def test_a_message_that_does_not_end_is_given_more_time_each_time() -> None:
    seen = Standstill()

    def patience(flushed: int, files: int) -> int:
        seen.judged(Lsn(flushed), Endless(1800), files)
        return seen.patience

    assert [patience(7, 3), patience(7, 3), patience(8, 3), patience(9, 3)] == [1, 2, 4, 8]
    assert [patience(9, 4), patience(9, 4)] == [1, 2]  # something got into the log


def test_who_is_stuck_streams_when_something_arrives() -> None:
    progress = Progress(state="streaming", flushed=Lsn(7))
    progress.enter_stuck(StreamLost("the reason"))
    progress.enter("streaming")
    assert (progress.state, progress.last_error) == ("stuck", "the reason")
    progress.flushed = Lsn(8)
    progress.enter("streaming")
    assert progress.state == "streaming"
