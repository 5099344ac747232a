"""A kept connection: used again, but neither a dead one nor one of long ago."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import psycopg
import pytest

from cdc_assets.postgres.session.kept import KeptConnection
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.support.waiting import wait_for


@pytest.fixture
def dsn(postgres_dsn: NewDatabase) -> str:
    return postgres_dsn()


def _kept(dsn: str, **more: float) -> KeptConnection:
    return KeptConnection(lambda: psycopg.connect(dsn, autocommit=True), **more)


def _backend(kept: KeptConnection) -> int:
    with kept.use() as connection:
        return connection.info.backend_pid


@pytest.fixture
def kept(dsn: str) -> Iterator[KeptConnection]:
    with closing(_kept(dsn)) as kept:
        yield kept


def test_it_is_used_again(kept: KeptConnection) -> None:
    assert _backend(kept) == _backend(kept)


def test_one_that_the_server_ended_is_made_anew_before_anything_is_asked(
    kept: KeptConnection, dsn: str
) -> None:
    first = _backend(kept)
    with psycopg.connect(dsn, autocommit=True) as other:
        other.execute("select pg_terminate_backend(%s)", [first])
        there = "select from pg_stat_activity where pid = %s"
        wait_for(lambda: not other.execute(there, [first]).fetchall())
    assert _backend(kept) != first


def test_one_of_long_ago_is_made_anew(dsn: str) -> None:
    with closing(_kept(dsn, seconds=0.0)) as kept:
        assert _backend(kept) != _backend(kept)


def test_an_error_ends_it(kept: KeptConnection) -> None:
    first = _backend(kept)
    with pytest.raises(psycopg.Error), kept.use() as connection:
        connection.execute("select 1 / 0")
    assert _backend(kept) != first
