"""The SQL of publications that ``check`` prints: whoever pastes it breaks no application."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from cdc_assets.config.addresses import source_dsn
from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.messages.findings import Finding
from cdc_assets.postgres.publication.contents import row_filters
from cdc_assets.readiness.source.server import preflight
from cdc_assets_tests.support.flusher import Bench

SETUP = """
create table virt (id int primary key, a int);
create table parts (id int primary key, n text);
create table nokey (id int);
create table good (id int primary key, a int);
"""
TABLES: tuple[dict[str, str], ...] = (
    {"name": "virt", "where": "a > 1"},
    {"name": "parts", "where": "n <> now()::text"},
    {"name": "nokey"},
    {"name": "good", "where": "id > 1"},
)


@pytest.fixture
def asked(source: Bench) -> Iterator[SourceConfig]:
    """A source whose role owns nothing, and reads all."""
    role = f"reader_{source.name}"[:63]
    source.execute(SETUP)
    source.execute(f"create role {role} login replication password 'p'")
    source.execute(f"grant create, temporary on database {source.name} to {role}")
    source.execute(f"grant select on all tables in schema public to {role}")
    settings: dict[str, Any] = source.settings()
    settings["postgres"] = {"dsn": make_conninfo(source.dsn, user=role, password="p")}
    try:
        yield parse_config({**settings, "tables": [*TABLES]}, "test")
    finally:
        source.execute(f"drop owned by {role}; drop role {role}")


def errors(config: SourceConfig) -> dict[str | None, list[Finding]]:
    """The errors by table."""
    found: dict[str | None, list[Finding]] = {}
    with psycopg.connect(source_dsn(config), autocommit=True) as asking:
        for finding in preflight(asking, config):
            if finding.severity == "error":
                found.setdefault(finding.table, []).append(finding)
    return found


def codes(config: SourceConfig) -> dict[str | None, list[str]]:
    return {table: [finding.code for finding in found] for table, found in errors(config).items()}


def test_what_postgres_would_refuse_is_not_published_by_it(
    source: Bench, asked: SourceConfig
) -> None:
    publication = f"cdc_{source.name}"
    source.execute(
        f"create publication {publication} for table virt, parts"
        " with (publish_via_partition_root = true)"
    )
    assert codes(asked) == {
        "public.virt": ["row_filter"],
        "public.parts": ["row_filter"],
        "public.nokey": ["replica_identity"],
        "public.good": ["table_owner"],
    }
    source.execute("revoke select on virt from public, " + f"reader_{source.name}"[:63])
    assert codes(asked)["public.virt"] == ["select_privilege"], "it isn't judged yet"
    source.execute(errors(asked)["public.good"][0].remedy)
    source.execute("update good set a = 2; update virt set a = 2; delete from virt")


def test_an_entry_is_replaced_in_one_transaction(source: Bench, asked: SourceConfig) -> None:
    source.execute(f"create publication cdc_{source.name} for table good")
    (found,) = errors(asked)["public.good"]
    said = found.remedy.partition(" --")[0]
    begin, drop, add, commit, rest = (part.strip() for part in said.split(";"))
    assert (begin, commit, rest) == ("begin", "commit", "")
    assert " drop table " in drop
    assert " add table " in add
    source.flush(asked)
    assert said in source.parked()["public.good"]
    source.execute(said)
    (oid,) = source.execute("select 'good'::regclass::oid::bigint")[0]
    assert row_filters(source.connection, f"cdc_{source.name}", [oid]) == {oid: "(id > 1)"}
    assert "public.good" not in errors(asked)


def test_a_publication_to_be_made_has_what_postgres_takes(
    source: Bench, asked: SourceConfig
) -> None:
    (found,) = errors(asked)[None]
    assert found.code == "publication_privilege"
    source.execute(found.remedy)
    made = source.execute("select tablename::text, rowfilter from pg_publication_tables")
    assert made == [("good", "(id > 1)")]
    source.execute("update good set a = 2; update virt set a = 2; delete from nokey")
