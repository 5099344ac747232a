"""Roles of the coordination database, and our own schema as each of them finds it.

``stranger`` may connect, and no more; ``maker`` may make schemas, too; ``cdc_state`` is our role,
which isn't a superuser, and ``ours`` its address. Their fixtures are in ``conftest.py``.
"""

from __future__ import annotations

import psycopg
from psycopg.conninfo import make_conninfo

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.log.store import LogStore
from cdc_assets.messages.findings import Finding
from cdc_assets.readiness.flushing import coordination_findings

SCHEMA = "_pg2iceberg"

ROLES = ("stranger", "maker", "cdc_state")

Session = psycopg.Connection[tuple[object, ...]]


def of(dsn: str, role: str) -> str:
    return make_conninfo(dsn, user=role, password="p")


def opened(dsn: str) -> LogStore:
    return LogStore.open(dsn, "src", SCHEMA)


def config_of(dsn: str) -> SourceConfig:
    given = {"name": "src", "postgres": {"dsn": dsn}, "tables": [{"name": "public.t"}]}
    return parse_config(given, "test")


def checked(dsn: str) -> dict[str, Finding]:
    return {finding.code: finding for finding in coordination_findings(config_of(dsn))}
