"""Everything that committed below a proven horizon is visible."""

from __future__ import annotations

import psycopg
import pytest

from cdc_assets.postgres.horizon import Horizon
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.support.synchronous import hanging_commits

SETUP = "create table t (id int primary key, v int); insert into t values (1, 0)"


@pytest.fixture
def dsn(postgres_dsn: NewDatabase) -> str:
    dsn = postgres_dsn()
    with psycopg.connect(dsn, autocommit=True) as source:
        source.execute(SETUP)
    return dsn


def test_where_nobody_writes_it_is_proven_at_once(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as source:
        assert Horizon.observe(source).is_proven(source)


def test_a_commit_whose_record_is_written_may_not_be_visible_yet(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as source:
        with hanging_commits(dsn, "update t set v = 1"):
            horizon = Horizon.observe(source)
            assert source.execute("select v from t").fetchone() == (0,)
            assert not horizon.is_proven(source)
            # What began later is of no concern to it.
            source.execute("set synchronous_commit = local; insert into t values (2, 2)")
            assert not horizon.is_proven(source)
        assert horizon.is_proven(source)
        assert source.execute("select v from t where id = 1").fetchone() == (1,)


def test_a_transaction_that_writes_holds_it_back_until_it_ends(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as source, psycopg.connect(dsn) as writer:
        writer.execute("savepoint s; update t set v = 1; release s")
        horizon = Horizon.observe(source)
        assert not horizon.is_proven(source)
        with psycopg.connect(dsn) as reader, psycopg.connect(dsn) as later:
            reader.execute("select from t")  # has no id
            later.execute("insert into t values (3, 3)")
            writer.commit()
            assert horizon.is_proven(source)


def test_a_prepared_transaction_holds_it_back(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as source:
        (most,) = source.execute("show max_prepared_transactions").fetchone() or ("0",)
        if most == "0":
            pytest.skip("the server has no room for prepared transactions")
        with psycopg.connect(dsn) as writer:
            writer.execute("update t set v = 1")
            writer.execute("prepare transaction 'horizon'")
        horizon = Horizon.observe(source)
        try:
            assert not horizon.is_proven(source)
        finally:
            source.execute("commit prepared 'horizon'")
        assert horizon.is_proven(source)
