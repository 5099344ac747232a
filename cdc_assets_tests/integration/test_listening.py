"""Whatever of ours listens, listens on loopback."""

from __future__ import annotations

import ipaddress
import socket
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
import pyarrow as pa
import pytest

from cdc_assets.config.source import parse_config
from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.lake.spark.properties import SparkServerSettings, spark_properties
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.lake.spark.session import open_session
from cdc_assets_tests.support.flusher import bench, start_flusher
from cdc_assets_tests.support.waiting import wait_for


def listening() -> dict[str, set[str]]:
    """By address, which of this process's descendants listen there."""
    found: dict[str, set[str]] = {}
    for child in psutil.Process().children(recursive=True):
        try:
            for connection in child.net_connections(kind="inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found.setdefault(connection.laddr.ip, set()).add(child.name())
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


def is_loopback(text: str) -> bool:
    address = ipaddress.ip_address(text)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def same(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


@pytest.mark.spark
def test_all_processes_listen_on_loopback_only(
    postgres: EmbeddedPostgres, spark_server: SparkServer, tmp_path: Path, tmp_home: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dsn = postgres.start()
    with bench(dsn, "listening", tmp_path) as source:
        source.execute("create table t (id int primary key)")
        settings = {**source.settings("public.t"), "metrics": {"port": port}}
        config = parse_config(settings, "test")
        file = tmp_path / "source.json"
        file.write_text(config.dump())
        flusher = start_flusher(file)
        session = open_session(config, spark_server.ensure())
        try:

            def serves() -> bool:
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                        return b"cdc" in answer.read()
                except OSError:
                    return False

            wait_for(serves)
            # Python's workers, and what Spark listens with while it works.
            assert session.range(10).mapInArrow(same, "id bigint").count() == 10
            found = listening()
            assert [address for address in found if not is_loopback(address)] == []
            names = {name for many in found.values() for name in many}
            assert {"java", "postgres"} <= names
            assert any(name.startswith("python") for name in names)
        finally:
            session.stop()
            assert flusher.stdin is not None
            flusher.stdin.close()
            flusher.wait(60)


def test_spark_settings_of_the_user_do_not_open_it(tmp_path: Path) -> None:
    conf = {
        "spark.driver.bindAddress": "0.0.0.0",
        "spark.connect.grpc.binding.address": "0.0.0.0",
        "spark.driver.host": "example.org",
    }
    properties = spark_properties(SparkServerSettings(conf=conf), tmp_path, "t0ken")
    assert {properties[name] for name in conf} == {"127.0.0.1"}
