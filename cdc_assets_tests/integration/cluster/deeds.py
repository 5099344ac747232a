"""What the platform does on its machine while the tests of the cluster look on.

Staging and warehouse are on an object store at the platform's address, which takes one key alone:
the one that the configuration has, and nobody's environment.
"""

from __future__ import annotations

import importlib.metadata
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from pyspark.errors import PySparkException

from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import CdcError, NotReady
from cdc_assets.lake.spark.session import lost_server, open_session
from cdc_assets.maintenance.run import maintain
from cdc_assets.operations.copying import mark_for_copy
from cdc_assets.postgres.names import TableId
from cdc_assets.readiness.executors.findings import python_findings
from cdc_assets.readiness.surroundings import review
from cdc_assets_tests.support.cluster import NODES, PLATFORM, WORKERS, Cluster
from cdc_assets_tests.support.lake import Lake, lake
from cdc_assets_tests.support.s3 import GATEWAY, ObjectStore, object_store
from cdc_assets_tests.support.sigv4 import Key

KEY = Key("cluster", "of the configuration alone")
ORDERS = TableId("public", "orders")
SETUP = """
create table orders (id int primary key, note text, doc text);
insert into orders select g, 'n' || g, repeat(md5(g::text), 8) from generate_series(1, 60000) g;
"""
CHANGES = """
update orders set note = note || 'x' where id % 3 = 0;
delete from orders where id % 7 = 0;
insert into orders select coalesce(max(id), 0) + 1, null, 'new' from orders;
"""


@dataclass
class Source:
    """A source on the cluster's Postgres, and where its files are."""

    cluster: Cluster
    lake: Lake
    store: ObjectStore

    def copy(self) -> None:
        self.lake.pin()
        self.lake.copy()

    def change(self) -> None:
        self.lake.execute(CHANGES)
        self.lake.flush()

    def care(self) -> None:
        done = list(maintain(self.lake.pipeline, lambda: self.lake.session, self.lake.tables))
        assert [one.problem for one in done] == [None]
        assert sum(one.compacted.rewritten_files for one in done)

    def compare(self) -> None:
        for found in self.lake.verify():
            assert found.equal, found
            assert found.source_rows

    def copy_anew(self) -> None:
        mark_for_copy(self.lake.pipeline, self.lake.tables)
        self.copy()
        self.lake.drain_all()

    def reopen(self) -> None:
        """A session of the server that is there now."""
        self.lake.session = open_session(self.lake.config)


@contextmanager
def source(cluster: Cluster, chunk_pages: int = 2048, **more: Any) -> Iterator[Source]:
    """A source with the table ``orders``; its database and slot are gone afterwards."""
    name = f"test_{secrets.token_hex(4)}"
    dsn = cluster.dsn.removesuffix("postgres") + name
    with (
        object_store(GATEWAY, PLATFORM, KEY) as store,
        psycopg.connect(cluster.dsn, autocommit=True) as admin,
    ):
        store.keys = {KEY.id: KEY}
        admin.execute(f"create database {name}".encode())
        key = {"access_key_id": KEY.id, "secret_access_key": KEY.secret}
        settings: dict[str, Any] = {
            "s3": {**store.settings, **key},
            "staging": {"uri": "s3://bucket/staging"},
            "lake": {"catalog": {"warehouse": "s3://bucket/warehouse"}},
            **more,
        }
        try:
            orders = {"name": "orders", "chunk_pages": chunk_pages}
            with lake(dsn, cluster.remote, SETUP, orders, **settings) as opened:
                yield Source(cluster, opened, store)
        finally:
            ended = (
                "select pg_terminate_backend(pid, 5000) from pg_stat_activity where datname = %s"
            )
            admin.execute(ended, [name])
            dropped = "select pg_drop_replication_slot(slot_name) from pg_replication_slots"
            admin.execute(f"{dropped} where database = %s", [name])
            admin.execute(f"drop database {name} with (force)".encode())


@contextmanager
def as_a_worker_works(source: Source, do: Callable[[str], None]) -> Iterator[None]:
    """Call ``do`` with the name of the first worker that asks the store for something."""
    workers = {NODES[name]: name for name in WORKERS}
    done, lock = threading.Event(), threading.Lock()

    def watch(handler: Any) -> None:
        worker = workers.get(handler.client_address[0])
        with lock:
            if worker is not None and not done.is_set():
                do(worker)
                done.set()

    source.store.watch = watch
    try:
        yield
        assert done.is_set(), "no worker asked the store for anything"
    finally:
        source.store.watch = lambda _: None


def all_of_it(cluster: Cluster) -> None:
    with source(cluster) as opened:
        opened.copy()
        opened.change()
        opened.lake.drain_all()
        opened.compare()
        opened.care()
        opened.compare()
        opened.copy_anew()
        opened.compare()
        assert not opened.store.refused
        written = opened.lake.lake_table(ORDERS).load()
        assert written is not None
        assert written.location().startswith("s3://bucket/warehouse/")


def workers_killed(cluster: Cluster) -> None:
    with source(cluster) as opened:
        lost: list[str] = []

        def kill(worker: str) -> None:
            cluster.machines[worker].kill()
            lost.append(worker)

        def change_and_merge() -> None:
            opened.change()
            opened.lake.drain_all()

        steps = (opened.copy, change_and_merge, opened.compare, opened.care, opened.copy_anew)
        for step in steps:
            with as_a_worker_works(opened, kill):
                step()
            cluster.restart_worker(lost.pop())
        opened.lake.catch_up()
        opened.compare()


def cut_off(cluster: Cluster, seconds: float) -> None:
    """A copy while its tasks are cut off from Postgres, and a merge, whose commits are."""
    with source(cluster) as opened:
        opened.lake.pin()
        mended: list[threading.Timer] = []

        def cut(_worker: str) -> None:
            cluster.cut()
            mended.append(threading.Timer(seconds, cluster.mend))
            mended[-1].start()

        for step in (opened.lake.copy, opened.lake.drain_all):
            with as_a_worker_works(opened, cut):
                _until_it_ends_well(step)
            mended.pop().join()
            opened.compare()
            opened.change()
        opened.lake.drain_all()
        opened.compare()


def _until_it_ends_well(step: Callable[[], None]) -> None:
    """As a follower and a run that is asked for again do it."""
    for left in reversed(range(10)):
        try:
            step()
        except (PySparkException, psycopg.Error, CdcError):
            if not left:
                raise
            time.sleep(2)
        else:
            return


def probed(cluster: Cluster) -> None:
    with source(cluster) as opened:
        assert about_executors(opened.lake.config) == {}
        opened.lake.pin()  # it has a catalog then
        assert about_executors(opened.lake.config) == {}
        left = opened.store.listed()
        assert not [path for path in left if "/.probe-" in path], left
        cluster.cut()
        try:
            found = about_executors(opened.lake.config)
        finally:
            cluster.mend()
        both = {"executor_source", "executor_coordination"}
        assert found.keys() - {"spark_catalog"} == both, found
        for code in both:
            assert [host in found[code] for host in WORKERS] == [True, True], found
        session = opened.lake.session
        session.conf.set("spark.sql.execution.pyspark.python", "/opt/none/bin/python")
        [finding] = python_findings(session)
        assert finding.code == "spark_python"
        assert "/opt/none/bin/python" in finding.message
        assert any(f"(on {host}, executor " in finding.message for host in WORKERS), finding
    with source(cluster, staging={}, lake={}) as alone:  # folders of the platform's
        found = about_executors(alone.lake.config)
        assert found.keys() == {"executor_staging", "executor_warehouse"}, found
        assert all(host in found["executor_staging"] for host in WORKERS), found
    with source(cluster) as opened, pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.metadata, "version", lambda _: "9.9.9")  # here, not there
        opened.lake.pin()
        with pytest.raises(NotReady, match=r"spark_python.*executor on one .*9\.9\.9"):
            opened.lake.copy()
        assert not [path for path in opened.store.listed() if path.endswith(".parquet")]


def about_executors(config: SourceConfig) -> dict[str, str]:
    """What ``check`` says of executors, by code."""
    found: dict[str, str] = {}
    for finding in review(config):
        if finding.code.startswith(("executor_", "spark_")):
            assert finding.remedy
            found[finding.code] = f"{found.get(finding.code, '')} {finding.message}"
    return found


def server_killed(cluster: Cluster) -> None:
    with source(cluster) as opened:

        def kill(_worker: str) -> None:
            cluster.machines["connect"].kill()

        opened.lake.pin()
        for step in (opened.lake.copy, opened.lake.drain_all):
            with as_a_worker_works(opened, kill):
                try:
                    step()
                except PySparkException as error:
                    assert lost_server(error), error  # noqa: PT017
                else:
                    raise AssertionError("it ended well without a server")
            cluster.start_connect()
            cluster.await_connect()
            opened.reopen()
            step()
            opened.change()
        opened.lake.drain_all()
        opened.compare()
