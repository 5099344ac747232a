"""A database to look at, in an empty folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.support.prepared import TABLES


@pytest.fixture
def admin(
    postgres_dsn: NewDatabase, tmp_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """The address of a database with such tables, and an empty folder to work in."""
    dsn = postgres_dsn()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("APP_DSN", dsn)
    with psycopg.connect(dsn, autocommit=True) as source:
        source.execute(TABLES.encode())
        yield dsn
        for role in ("cdc_app", "cdc_app_stream"):
            there = source.execute("select 1 from pg_roles where rolname = %s", (role,)).fetchone()
            if there is not None:
                source.execute(f"drop owned by {role} cascade".encode())
                source.execute(f"drop role {role}".encode())
