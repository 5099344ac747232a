"""Who is taken for dead, against a real server: never oneself, and nobody by one who overslept."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import psycopg
import pytest

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.log.sessions import heartbeat as heart
from cdc_assets.log.sessions.heartbeat import Heart
from cdc_assets.log.store import LogStore
from cdc_assets_tests.conftest import NewDatabase

Open = Callable[[], LogStore]


@pytest.fixture
def config(postgres_dsn: NewDatabase) -> SourceConfig:
    postgres = {"dsn": postgres_dsn()}
    return parse_config({"name": "src", "postgres": postgres, "tables": [{"name": "t"}]}, "test")


@pytest.fixture
def opened(config: SourceConfig) -> Iterator[Open]:
    stores: list[LogStore] = []

    def one() -> LogStore:
        assert config.postgres.dsn is not None
        dsn = config.postgres.dsn.get_secret_value()
        stores.append(LogStore.open(dsn, "src", "_pg2iceberg"))
        return stores[-1]

    yield one
    for store in stores:
        store.close()


def alive(store: LogStore) -> bool:
    try:
        store.server_now()
    except psycopg.OperationalError:
        return False
    return True


def unheard_of(store: LogStore) -> None:
    """As if its process had been silent for an hour."""
    store.connection.execute(
        "update sessions set heartbeat_at = heartbeat_at - interval '1 hour' where pid = %s",
        (store.connection.info.backend_pid,),
    )


def test_a_heart_never_ends_a_session_of_its_own_process(
    config: SourceConfig, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heart, "HEARTBEAT_SECONDS", 0.002)
    ours = Heart(config)
    ours.start()
    stores = [opened() for _ in range(60)]
    for store in stores:
        ours.adopt(store)
    given_up = stores.pop()
    ours.give_up(given_up.connection.info.backend_pid)
    while alive(given_up):  # that one is: behind a dead connection it would keep its locks
        time.sleep(0.01)
    ours.close()
    assert all(alive(store) for store in stores)


def test_who_overslept_ends_nobody_before_the_others_could_say_that_they_live(
    config: SourceConfig, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heart, "STALE_SECONDS", 0.4)
    ours, theirs = Heart(config), Heart(config)
    ours.adopt(opened())
    stores = [opened() for _ in range(2)]
    for store in stores:
        theirs.adopt(store)
        unheard_of(store)
        ours._beat()  # the first one ever; or the first one after it was stopped, or cut off
        assert alive(store)
        while alive(store):
            ours._beat()
            time.sleep(0.01)
        time.sleep(0.5)
    ours._connection.close()
