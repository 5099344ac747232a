"""REST catalogs as AWS and others have them: signed requests, and keys for S3 that they lend."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from moto.backends import get_backend
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from cdc_assets.lake.spark.session import open_session
from cdc_assets.maintenance.run import maintain
from cdc_assets.postgres.names import TableId
from cdc_assets.readiness.surroundings import review
from cdc_assets.snapshot.coordinator import copy_tables
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.integration.snapshot.sources import PAIR
from cdc_assets_tests.support.lake import Lake, NewLake, copied, used
from cdc_assets_tests.support.lending import lending
from cdc_assets_tests.support.rest_catalog import REGION, SERVICE, RestCatalog, rest_catalog
from cdc_assets_tests.support.s3 import KEYS, ObjectStore, status
from cdc_assets_tests.support.sigv4 import Key
from cdc_assets_tests.support.waiting import wait_for

pytestmark = pytest.mark.spark

T = TableId("public", "t")
SETUP = (
    "create table t (id int primary key, v text); insert into t select i, 'x' from"
    " generate_series(1, 99) i"
)
OURS = Key(KEYS["AWS_ACCESS_KEY_ID"], KEYS["AWS_SECRET_ACCESS_KEY"])
SIGNED = {
    "rest.sigv4-enabled": "true",
    "rest.signing-region": REGION,
    "rest.signing-name": SERVICE,
}


def _settings(server: RestCatalog, warehouse: str, properties: dict[str, str]) -> dict[str, Any]:
    """Version 2: pyiceberg, which the server keeps its tables by, upgrades none to 3."""
    catalog = {"type": "rest", "uri": server.uri, "warehouse": warehouse, "properties": properties}
    return {"lake": {"catalog": catalog, "format_version": 2}}


def _used(source: Lake, server: RestCatalog) -> None:
    used(source, T)
    assert len(server.agents) > 1, "Spark and pyiceberg both came"
    assert server.located == set()


def test_each_request_is_signed(copied_lake: NewLake, tmp_path: Path) -> None:
    warehouse = f"file://{tmp_path}/warehouse"
    with rest_catalog(tmp_path, warehouse, key=OURS) as server:
        with copied_lake(SETUP, "t", **_settings(server, warehouse, SIGNED)) as source:
            _used(source, server)
        assert server.refused == 0
        assert server.tables.list_tables("src") == []


@pytest.mark.parametrize(
    ("secret", "wrong"),
    [
        (OURS.secret, {"rest.signing-region": "eu-west-9"}),
        (OURS.secret, {"rest.signing-name": "glue"}),
        ("another", {}),
    ],
)
def test_a_request_that_is_signed_otherwise_is_refused(
    new_lake: NewLake, tmp_path: Path, secret: str, wrong: dict[str, str]
) -> None:
    warehouse = f"file://{tmp_path}/warehouse"
    with rest_catalog(tmp_path, warehouse, key=Key(OURS.id, secret)) as server:
        settings = _settings(server, warehouse, {**SIGNED, **wrong})
        with new_lake(SETUP, "t", **settings) as source:
            found = {finding.code: finding for finding in review(source.config)}
            assert found["catalog_unwritable"].severity == "error"
            assert server.refused


@pytest.mark.aws
def test_keys_that_the_catalog_lends(
    postgres_dsn: NewDatabase, keyless_spark: str, tmp_path: Path, s3: ObjectStore
) -> None:
    with lending(tmp_path, s3) as catalog:
        settings = {"s3": s3.settings, "lake": catalog.settings}
        with copied(postgres_dsn(), keyless_spark, SETUP, "t", **settings) as source:
            catalog.end()
            _used(source, catalog.server)
            assert s3.refused == {}
    assert catalog.lent


@pytest.mark.aws
def test_a_copy_goes_on_with_other_keys_when_those_that_were_lent_are_over(
    new_lake: NewLake, tmp_path: Path, s3: ObjectStore
) -> None:
    """As long as it gets on: where keys never do, it ends."""
    files = Counter[str]()

    def is_data(handler: Any) -> bool:
        files[handler.command] += "/data/" in handler.path
        return handler.command == "PUT" and "/data/" in handler.path

    def refuse_all_but_one(handler: Any) -> bool:
        if not is_data(handler) or files["PUT"] == 1:
            return False
        return status(403, "AccessDenied")(handler)

    def end_at_each_third(handler: Any) -> bool:
        if is_data(handler) and files["PUT"] % 3 == 0:
            catalog.end()
        return False

    tables = [{"name": name, "chunk_pages": 1} for name in ("t", "u")]
    with lending(tmp_path, s3) as catalog:
        one = {"max_parallel_chunks": 1}  # for each table
        settings = {"s3": s3.settings, "lake": catalog.settings, "snapshot": one}
        with new_lake(PAIR, *tables, **settings) as source:
            source.pin()
            s3.fault = refuse_all_but_one
            failed = copy_tables(source.pipeline, source.session, source.tables)
            assert all("can't be copied" in str(failed[table]) for table in source.tables)
            assert not s3.refused
            s3.fault = end_at_each_third
            # Tasks are done again; a landing whose keys end in its midst is left to the next run.
            wait_for(lambda: not copy_tables(source.pipeline, source.session, source.tables))
            assert s3.refused
            assert all(source.equal(table) for table in source.tables)


@pytest.mark.aws
def test_a_copy_waits_for_its_slots_for_longer_than_keys_live(
    new_lake: NewLake, tmp_path: Path, s3: ObjectStore
) -> None:
    """By then none of its tasks has written a file with the keys that the job was given."""

    def idle(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            time.sleep(4)
            yield batch

    with lending(tmp_path, s3) as catalog:
        settings = {"s3": s3.settings, "lake": catalog.settings}
        with new_lake(SETUP, "t", **settings) as source, ThreadPoolExecutor() as pool:
            source.pin()
            other = open_session(source.config)
            busy = pool.submit(other.range(0, 8, 1, 8).mapInArrow(idle, "id long").collect)
            time.sleep(3)
            copied = pool.submit(copy_tables, source.pipeline, source.session, source.tables)
            while not busy.done() and not s3.refused:
                catalog.end()
                time.sleep(0.2)
            assert not copied.result()
            assert s3.refused
            assert source.equal(T)
            other.stop()


@pytest.mark.aws
@pytest.mark.parametrize("renews", [True, False])
def test_a_statement_outlives_its_keys_where_the_catalog_renews_them(
    copied_lake: NewLake, tmp_path: Path, s3: ObjectStore, renews: bool
) -> None:
    """Elsewhere it fails, and the merge is done again: with other keys."""

    def slowly(handler: Any) -> bool:
        if "/data/" in handler.path and "java" in handler.headers["User-Agent"]:
            time.sleep(4)
        return False

    with lending(tmp_path, s3, renews=renews) as catalog:
        settings = {"s3": s3.settings, "lake": catalog.settings}
        with copied_lake(SETUP, "t", **settings) as source:
            source.execute("update t set v = 'y' where id > 50")
            s3.fault, catalog.seconds = slowly, 3.0
            with nullcontext() if renews else pytest.raises(PySparkException, match="Code: 400"):
                source.catch_up()
            assert bool(s3.refused) is not renews
            s3.fault, catalog.seconds = None, 3600.0
            source.catch_up()
            assert source.equal(T)


@pytest.mark.aws
def test_care_outlives_the_keys_that_it_began_with(
    copied_lake: NewLake, tmp_path: Path, s3: ObjectStore
) -> None:
    """Each statement of Spark's lasts for longer than what was lent before it lives."""

    def session() -> SparkSession:
        catalog.end()
        return source.session

    keep = {"keep_snapshots": {"count": 1, "age": "0s"}, "min_input_files": 2}
    with lending(tmp_path, s3) as catalog:
        settings = {"s3": s3.settings, "lake": catalog.settings, "maintenance": keep}
        with copied_lake(SETUP, "t", **settings) as source:
            for value in "abc":
                source.execute(f"update t set v = '{value}' where id > 50")
                source.catch_up()
            left = f"{source.lake_table(T).loaded().location()}/data/left.parquet"
            _store_long_ago(s3, left.removeprefix("s3://"))
            [done] = maintain(source.pipeline, session, [T])
            assert done.problem is None
            assert (done.expired.snapshots > 0, done.orphans.files) == (True, 1)
            assert source.equal(T)


def _store_long_ago(store: ObjectStore, path: str) -> None:
    with store.inside().open_output_stream(path) as stream:
        stream.write(b"left behind")
    bucket, _, key = path.partition("/")
    [backend] = (b for regions in get_backend("s3").values() for b in regions.values() if b.buckets)
    backend.buckets[bucket].keys[key].last_modified -= timedelta(days=30)
