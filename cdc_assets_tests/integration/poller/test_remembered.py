"""What a failover or a clock may have hidden is read again, whatever ends before that is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from cdc_assets.poller.clock import SECOND
from cdc_assets.poller.poller import Ending, Poller
from cdc_assets.poller.source import Place, place
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.support.queried import BY_CLOCK, CLOCKED, Queried, queried

U = TableId("public", "u")
BOTH = CLOCKED + CLOCKED.replace(" t ", " u ")
OLD = "insert into u values (1, 'hidden', now() - interval '1 day')"


@pytest.fixture
def source(postgres_dsn: NewDatabase, tmp_home: object) -> Iterator[Queried]:
    tables = (BY_CLOCK, BY_CLOCK | {"name": "u"})
    with queried(postgres_dsn(), BOTH, *tables, staging={"flush_bytes": 1000}) as opened:
        opened.poll()
        yield opened


def failed_over(at: Place) -> Place:
    return replace(at, timeline=at.timeline + 1)


def set_back(at: Place) -> Place:
    """By two days, which a clock of another process can't measure: all may be hidden."""
    behind = at.clock.server - 2 * 86_400 * SECOND
    return replace(at, shown=behind, clock=replace(at.clock, server=behind))


@pytest.fixture(params=[failed_over, set_back])
def another_place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    changed: Callable[[Place], Place] = request.param
    monkeypatch.setattr("cdc_assets.poller.poller.place", lambda session: changed(place(session)))


def test_by_a_process_that_begins_after_a_table_was_locked(
    source: Queried, another_place: None
) -> None:
    source.execute(OLD)
    with source.session() as locking:
        locking.execute("begin; lock table u")
        source.begin()
        assert not source.poll()
        locking.execute("rollback")
    source.begin()
    source.poll()
    assert source.is_level(U)


def test_by_a_process_that_begins_after_half_of_a_poll(
    source: Queried, another_place: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first table so much is found that it is registered before the second one is read."""
    source.execute("insert into t select i, repeat('x', 100) from generate_series(1, 100) i")
    source.execute(OLD)
    source.begin()
    register = Poller.registered_some
    some = list[Ending]()

    def registered(self: Poller, ending: Ending) -> None:
        assert not some, "the process ends before the next part"
        register(self, ending)
        some.append(ending)

    with monkeypatch.context() as dying:
        dying.setattr(Poller, "registered_some", registered)
        dying.setattr(Poller, "register", lambda *_: pytest.fail("the process ends"))
        with pytest.raises(pytest.fail.Exception, match="the process ends"):
            source.poll()
    assert some
    source.begin()
    source.poll()
    assert source.is_level(U)
