"""A source with a copy that its tables are read from, under traffic."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psycopg
from pydantic import SecretStr

from cdc_assets.config.snapshot import SnapshotConfig
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.log.states import TableState
from cdc_assets.pins.pins import Pins
from cdc_assets.postgres.names import TableId
from cdc_assets.readiness.surroundings import review
from cdc_assets_tests.faults.test_failover import Pair, standby_pair
from cdc_assets_tests.integration.snapshot.sources import T
from cdc_assets_tests.integration.snapshot.test_incremental import Writer
from cdc_assets_tests.support.incremental import TOAST
from cdc_assets_tests.support.lake import Lake, lake
from cdc_assets_tests.support.threads import beside
from cdc_assets_tests.support.waiting import wait_for

A, S = TableId("public", "a"), TableId("public", "s")
SETUP = f"""{TOAST}
create table a (n bigint generated always as identity, v text);
create table s (id int primary key, v text);
insert into s select i, 'old ' || i from generate_series(1, 60000) i;
"""
PARTS = """
create table p (id int primary key, v text) partition by range (id);
create table p1 partition of p for values from (0) to (1000);
create table p2 partition of p for values from (1000) to (3000);
insert into p select i, 'old ' || i from generate_series(0, 2999) i;
"""
STANDBY = {"hot_standby_feedback": "off", "sync_replication_slots": "off"}
TABLES = (
    {"name": "t", "chunk_pages": 64},
    {"name": "a", "mode": "append"},
    {"name": "s", "mode": "soft_delete"},
)


@contextmanager
def opened(
    home: Path,
    spark: SparkServer,
    *,
    setup: str = SETUP,
    tables: Sequence[Any] = TABLES,
    kind: str = "clone",
    standby: Mapping[str, str] = MappingProxyType({}),
    **origin: str,
) -> Iterator[tuple[Lake, Pair]]:
    """A source, and a standby of it that tables are to be copied from."""
    with standby_pair(home, {**STANDBY, **standby}, {}) as both:
        snapshot = {"from": {"kind": kind, "dsn": both.standby_dsn} | origin}
        dsn = both.primary.start()
        with lake(dsn, spark.ensure(), setup, *tables, snapshot=snapshot) as source:
            yield source, both


@contextmanager
def writing(source: Lake, dsn: str = "", *, most: float = inf) -> Iterator[list[int]]:
    """A client that changes t, and inserts into a; how often it did.

    ``dsn``: of the primary, if the source is a standby. ``most``: how often it does at all, where
    what is tested merges all that came meanwhile, again and again: a slow machine never ends that.
    """
    done, dsn = [0], dsn or source.pipeline.source_dsn

    def work(stop: threading.Event) -> None:
        writer = Writer(dsn, 7)
        with psycopg.connect(dsn, autocommit=True) as session:
            while done[0] < most and not stop.wait(0.002):
                writer.change(1)
                session.execute("insert into a (v) values ('x')")
                some = 1 + done[0] % 60000
                session.execute("delete from s where id = %s", (some,))
                session.execute("insert into s values (%s, 'new')", (100000 + done[0],))
                done[0] += 1
        writer.close()

    with beside(work):
        yield done


def reached(source: Lake, state: TableState) -> bool:
    source.pins.tick()
    return all(source.row(table).state == state for table in source.tables)


def begun(source: Lake) -> bool:
    """Whether the logs have begun that a copy is needed for, of any later moment."""
    source.pins.tick()
    return all(source.row(table).log_from is not None for table in source.tables)


def begin(source: Lake) -> None:
    """Have the source prepared, and the logs begun."""
    source.pins.prepare()
    wait_for(lambda: begun(source))


def check_exact(source: Lake) -> None:
    """Whether each change is in the lake once: of a mirror, a history, and one that keeps rows."""
    assert source.equal(T)
    rows = source.session.table(source.lake_table(A).sql_name).select("n", "_op").collect()
    assert {row["_op"] for row in rows} == {"I"}
    inserted = source.execute("select n from a order by n")
    assert sorted(row["n"] for row in rows) == [n for (n,) in inserted]
    kept = source.session.table(source.lake_table(S).sql_name).collect()
    there = sorted(row["id"] for row in kept if row["_deleted_at"] is None)
    assert there == [n for (n,) in source.execute("select id from s order by id")]
    # They are deleted one after the other; the copy has none that was deleted before it.
    gone = sorted(row["id"] for row in kept if row["_deleted_at"] is not None)
    assert gone
    assert gone == [*range(gone[0], len(inserted) + 1)]


def lead_to(source: Lake, dsn: str, lsn: str | None = None) -> None:
    """From now on tables are copied from there."""
    origin = source.config.snapshot.from_
    assert origin is not None
    changed = origin.model_copy(update={"dsn": SecretStr(dsn), "lsn": lsn})
    copy_by(source, source.config.snapshot.model_copy(update={"from_": changed}))


def copy_by(source: Lake, snapshot: SnapshotConfig) -> None:
    """From now on tables are copied so."""
    source.pins.close()
    source.config = source.config.model_copy(update={"snapshot": snapshot})
    source.pipeline.config = source.config
    source.pins = Pins(source.pipeline)


def waits_for(source: Lake, table: TableId = T) -> str:
    """The code of what keeps the table from being copied."""
    source.pins.tick()
    row = source.row(table)
    assert row.state == TableState.WAITING
    code = str(row.reason).partition(":")[0]
    assert code in {finding.code for finding in review(source.config)}
    return code


READ = """
select coalesce(seq_scan, 0) + coalesce(idx_scan, 0), seq_tup_read + coalesce(idx_tup_fetch, 0)
  from pg_stat_user_tables where relname = 't'
"""
HELD = """
select (select count(*) from pg_stat_activity where backend_xmin is not null
         and application_name like 'cdc_assets src%' and pid <> pg_backend_pid()),
       (select count(*) from pg_replication_slots where xmin is not null)
"""
