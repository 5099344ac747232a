"""A source that is a hot standby, beside the primary that its clients write to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psycopg

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets_tests.faults.test_failover import Pair, standby_pair

PUBLICATION = "create publication cdc_src with (publish_via_partition_root = true)"
NOTHING: Mapping[str, Any] = MappingProxyType({})


@contextmanager
def published(
    home: Path,
    setup: str,
    tables: str,
    *,
    standby: Mapping[str, str] = NOTHING,
    primary: Mapping[str, str] = NOTHING,
    version: int = 18,
) -> Iterator[tuple[Pair, psycopg.Connection[Any]]]:
    """A pair whose primary has the tables, and publishes those; and a client of the primary."""
    alone = {"sync_replication_slots": "off"} if version >= 17 else {}
    with (
        standby_pair(home, {**alone, **standby}, {"autovacuum": "off", **primary}, version) as both,
        psycopg.connect(both.primary.start(), autocommit=True) as client,
    ):
        client.execute(setup.encode())
        client.execute(PUBLICATION)
        if tables:
            client.execute(f"alter publication cdc_src add table {tables}".encode())
        both.await_replay()
        yield both, client


def of_standby(
    both: Pair, log_dsn: str, folder: Path, *tables: Any, hurry: bool = True, **settings: Any
) -> SourceConfig:
    """``hurry``: the primary is asked to log its running transactions."""
    address: dict[str, Any] = {"dsn": both.standby_dsn, "standby": True}
    if hurry:
        address["primary_dsn"] = both.primary.start()
    named: Sequence[Any] = [{"name": t} if isinstance(t, str) else t for t in tables]
    given = {
        "name": "src",
        "postgres": address,
        "state": {"postgres_url": log_dsn},
        "staging": {"uri": (folder / "staging").as_uri()},
        "tables": named,
        **settings,
    }
    return parse_config(given, "test")
