"""The administrator's script of ``cdc-assets init``, in psql."""

from __future__ import annotations

import os
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets_tests.support.prepared import paste, ran

pytestmark = pytest.mark.timeout(300)


def test_what_is_named_gets_its_identity_before_it_is_published(
    admin: str, postgres: EmbeddedPostgres
) -> None:
    ran("init", "app", "--yes", "--table", "keyless")
    script = Path("app.sql").read_text()
    altered = "alter table public.keyless replica identity full; alter publication"
    assert f'{altered} "cdc_app" add table only "public"."keyless"' in script
    paste(postgres, admin, script)
    with psycopg.connect(admin, autocommit=True) as source:
        source.execute("insert into keyless values (1); update keyless set a = 2")


def test_what_got_no_identity_is_not_published(admin: str, postgres: EmbeddedPostgres) -> None:
    """Somebody has locked the table: the script ends there, and is run again later."""
    ran("init", "app", "--yes", "--table", "keyless", "--table", "orders")
    script = Path("app.sql").read_text()
    published = "select tablename::text from pg_publication_tables order by 1"
    with psycopg.connect(admin) as holder, psycopg.connect(admin, autocommit=True) as source:
        holder.execute("lock table keyless in access share mode")
        paste(postgres, admin, script, fails="canceling statement due to lock timeout")
        assert source.execute(published).fetchall() == []
        source.execute("update keyless set a = 2")
        holder.rollback()
        for _ in range(2):
            paste(postgres, admin, script)
            assert source.execute(published).fetchall() == [("keyless",), ("orders",)]
        source.execute("update keyless set a = 2")


def test_a_role_logs_in_once_its_password_was_given(admin: str, postgres: EmbeddedPostgres) -> None:
    ran("init", "app", "--yes", "--own-roles")
    script = Path("app.sql").read_text()
    made = (
        "select rolname::text, rolcanlogin, rolpassword is not null from pg_authid"
        " where rolname ~ '^cdc_app' order by 1"
    )
    unanswered = script.replace("\\password cdc_app_stream", "select 1 / 0;")
    paste(postgres, admin, unanswered, fails="division by zero")
    with psycopg.connect(admin, autocommit=True) as source:
        before = [("cdc_app", True, True), ("cdc_app_stream", False, False)]
        assert source.execute(made).fetchall() == before
        paste(postgres, admin, script)
        assert source.execute(made).fetchall() == [(name, True, True) for name, *_ in before]


def test_no_transaction_is_open_while_a_password_is_asked_for(
    admin: str, postgres: EmbeddedPostgres
) -> None:
    ran("init", "app", "--yes", "--own-roles")
    script = Path("app.sql").read_text()
    for role in ("cdc_app", "cdc_app_stream"):
        asked = f"\\password {role}\n"
        assert script.count(asked) == 1
        script = script.replace(asked, f"select 1 / (now() = statement_timestamp())::int;\n{asked}")
    paste(postgres, admin, script)


def test_no_name_of_the_source_ends_a_comment(
    admin: str, monkeypatch: pytest.MonkeyPatch, postgres: EmbeddedPostgres
) -> None:
    name = "nl\ndrop table orders; --"
    with psycopg.connect(admin, autocommit=True) as source:
        source.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
        try:
            monkeypatch.setenv("APP_DSN", make_conninfo(admin, dbname=name))
            with psycopg.connect(os.environ["APP_DSN"], autocommit=True) as hostile:
                hostile.execute("create table orders (id int primary key)")
                ran("init", "app", "--yes")
                paste(postgres, os.environ["APP_DSN"], Path("app.sql").read_text())
                assert hostile.execute("select 1 from pg_class where relname = 'orders'").fetchone()
                for role in ("cdc_app", "cdc_app_stream"):
                    hostile.execute(f"drop owned by {role} cascade".encode())
        finally:
            source.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))
