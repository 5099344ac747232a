"""Promise 2: ``check`` names every right that a role of ours, of both, has and doesn't need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from cdc_assets.config.source import parse_config
from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.messages.findings import Finding
from cdc_assets.postgres.session.connect import connect
from cdc_assets.readiness.source.server import preflight
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.security.roles import apply_roles, dropped_after, dsn_of

SETUP = """
create table t (id int primary key, v text);
create table other (id int primary key, v text);
create table parts (id int primary key, v text) partition by range (id);
create table parts_1 partition of parts for values from (0) to (1000);
"""


class Checked:
    """A database with the roles of ``roles.sql``."""

    def __init__(self, owner: psycopg.Connection[Any], dsn: str) -> None:
        self.owner = owner
        self.dsn = dsn

    def found(self, **replication: str) -> list[Finding]:
        """Findings of the roles' rights."""
        dsns = {"dsn": dsn_of(self.dsn, "cdc_source")} | replication
        tables = [{"name": "t"}, {"name": "parts"}]
        config = parse_config({"name": "src", "postgres": dsns, "tables": tables}, "test")
        with connect(dsns["dsn"]) as source:
            found = preflight(source, config)
        return [f for f in found if f.code in ("excess_rights", "replication_elsewhere")]

    def after(self, statement: str) -> list[str]:
        """What is said, with its severity, once an administrator has run ``statement``."""
        self.owner.execute(statement.encode())
        both = self.found(replication_dsn=dsn_of(self.dsn, "cdc_replication"))
        return [f"{f.severity}: {f.message}" for f in both]


@pytest.fixture
def checked(postgres: EmbeddedPostgres, postgres_dsn: NewDatabase) -> Iterator[Checked]:
    dsn = postgres_dsn()
    with dropped_after(dsn), psycopg.connect(dsn, autocommit=True) as owner:
        owner.execute(SETUP.encode())
        apply_roles(postgres, dsn, "public.t; public.parts")
        yield Checked(owner, dsn)


def test_promise_2_the_role_that_streams_is_looked_at_too(checked: Checked) -> None:
    assert checked.after("select") == []
    for right, words in (
        ("grant select (id) on t to cdc_replication", "may read public.t"),
        ("grant select on other to cdc_replication", "may read public.t, public.other"),
        ("grant update (v) on other to cdc_replication", "may write to public.other"),
        ("alter role cdc_replication bypassrls", "bypasses row-level security"),
        ("alter table t enable row level security", "bypasses row-level security"),
        ("alter role cdc_replication superuser", "is a superuser"),
    ):
        (said,) = [s for s in checked.after(right) if "cdc_replication" in s]
        assert said.startswith("warning: the role cdc_replication, which streams, "), right
        assert words in said, right
    # The same role at both addresses is named once.
    one = dsn_of(checked.dsn, "cdc_source")
    checked.owner.execute("alter role cdc_source replication createdb")
    assert len(checked.found(replication_dsn=one)) == 1


def test_promise_2_rights_on_tables_that_are_not_replicated_are_named(checked: Checked) -> None:
    role = "the role cdc_source, which reads the tables, "
    assert checked.after("grant select (v) on other to cdc_source") == [
        f"info: {role}may read what isn't replicated here: public.other."
    ]
    checked.owner.execute("create schema _mine; create table _mine.own (id int)")
    (said,) = checked.after("alter table _mine.own owner to cdc_source")
    assert said.startswith(f"warning: {role}owns, or may become the owner of, _mine.own")
    # Ours, where the coordination schema is in the source.
    checked.owner.execute(
        "drop schema _mine cascade; revoke select (v) on other from cdc_source;"
        " create table _pg2iceberg.tables (id int); alter table _pg2iceberg.tables owner to"
        " cdc_source; grant all on schema _pg2iceberg to cdc_source"
    )
    assert checked.after("select") == []


def test_promise_2_row_level_security_of_a_partition_needs_the_right_to_bypass_it(
    checked: Checked,
) -> None:
    (said,) = checked.after("alter role cdc_source bypassrls")
    assert "bypasses row-level security" in said
    assert checked.after("alter table parts_1 enable row level security") == []
