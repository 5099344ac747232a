"""Sessions of the roles of ``coordination.py``, for promise 5's files."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from psycopg import sql

from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.security.coordination import ROLES, Session, of


@pytest.fixture
def database(postgres_dsn: NewDatabase) -> Iterator[str]:
    """A superuser's address."""
    dsn = postgres_dsn()
    with psycopg.connect(dsn, autocommit=True) as admin:
        name = sql.Identifier(admin.info.dbname)
        for role in ROLES:
            admin.execute(f"create role {role} login password 'p'".encode())
        for role in ("maker", "cdc_state"):
            who = sql.Identifier(role)
            admin.execute(sql.SQL("grant create on database {} to {}").format(name, who))
        yield dsn
        admin.execute(
            "select pg_terminate_backend(pid, 5000) from pg_stat_activity where usename = any(%s)",
            (list(ROLES),),
        )
        for role in ROLES:
            admin.execute(f"drop owned by {role} cascade; drop role {role}".encode())


@pytest.fixture
def admin(database: str) -> Iterator[Session]:
    with psycopg.connect(database, autocommit=True) as connection:
        yield connection


@pytest.fixture
def maker(database: str) -> Iterator[Session]:
    with psycopg.connect(of(database, "maker"), autocommit=True) as connection:
        yield connection


@pytest.fixture
def stranger(database: str) -> Iterator[Session]:
    with psycopg.connect(of(database, "stranger"), autocommit=True) as connection:
        yield connection


@pytest.fixture
def ours(database: str) -> str:
    return of(database, "cdc_state")
