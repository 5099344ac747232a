"""The coordination role can damage only the log and its own lake tables."""

from __future__ import annotations

import json
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException

from cdc_assets.errors import CdcError, TableProblem
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.materializer.reread import rereader
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.security.canaries import Planted, change, contents, planted

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

T = TableId("public", "t")
# Where a plan's text would have to be run for the function to be called.
PLANTS = {
    "block": """alter table snapshot_progress alter first_block type text
        using '0,0)''::tid and public.canary() is not true and ctid >= ''(0'""",
    "oid": """alter table snapshot_progress alter relation_oid drop default,
        alter relation_oid type text using '0)::bigint + (public.canary()::int'""",
}


@pytest.fixture
def found(
    postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path, tmp_path: Path
) -> Iterator[Planted]:
    with planted(postgres_dsn, spark_server.ensure(), tmp_path) as opened:
        yield opened


@pytest.fixture
def copied(found: Planted) -> Planted:
    found.lake.pin()
    found.lake.copy()
    change(found, "merged")
    found.lake.drain(T)
    return found


def attempt(found: Planted) -> str:
    """Copy what may be copied; what was said of what may not."""
    said = ""
    for _ in range(3):
        try:
            found.lake.pin()
            found.lake.copy()
        except (CdcError, psycopg.Error, PySparkException, ValueError, AssertionError) as error:
            said += str(error)
    return said


@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS)
def test_no_text_of_a_plan_is_run_at_the_source(found: Planted, plant: str) -> None:
    found.lake.pin()
    assert found.plant(plant)
    attempt(found)
    time.sleep(1)  # what Spark's tasks did is told by their sessions
    assert found.calls() == 0


def test_no_plan_reads_a_table_that_isnt_replicated(found: Planted) -> None:
    [(oid, node)] = found.lake.execute(
        "select oid, relfilenode from pg_class where oid = 'secret'::regclass"
    )
    found.lake.pin()
    assert found.plant(
        "update snapshot_progress set relation = 'public.secret', relation_oid = %s, filenode = %s",
        oid,
        node,
    )
    attempt(found)
    with suppress(PySparkException):  # refused each time, so that there is no lake table
        assert "canary" not in found.values()


def test_no_registered_oid_says_which_columns_of_a_table_are_read(copied: Planted) -> None:
    """The flusher parks such a table; what runs before it looks has to refuse by itself."""
    [(oid,)] = copied.lake.execute("select 'secret'::regclass::oid")
    copied.plant("update tables set oid = %s", oid)
    with pytest.raises(TableProblem, match="isn't the one that is registered"):
        list(rereader(copied.lake.pipeline, copied.lake.lake_table(T), frozenset)([("1",)]))


def test_no_number_that_is_none_gets_into_spark(copied: Planted) -> None:
    proof = f"canary{secrets.token_hex(8)}"
    number = f"' || reflect('java.io.File', 'createTempFile', '{proof}', 'x') || '"
    copied.lake.execute("update t set a = '{{1},{2}}' where id = 1")  # which is refused by number
    copied.lake.flush()
    copied.plant(
        "update tables set columns = jsonb_set(columns, '{2,number}', to_jsonb(%s::text))", number
    )
    with pytest.raises(Exception) as refused:  # noqa: PT011 - which one is said below
        copied.lake.drain(T)
    assert not list(Path(tempfile.gettempdir()).glob(f"{proof}*"))
    assert "columns of public.t can't be read" in str(refused.value)


def test_a_file_that_no_worker_of_the_table_wrote_is_not_taken_up(found: Planted) -> None:
    canary = found.outside / "canary.parquet"
    ids, nothing = pa.array([7], pa.int32()), pa.array([None], pa.list_(pa.int32()))
    pq.write_table(pa.table({"id": ids, "v": ["canary"], "a": nothing}), canary)
    before = contents(found.outside)
    found.lake.pin()
    assert found.plant(
        "update snapshot_progress set state = 'written', file = %s, rows = 1, bytes = 1",
        canary.as_uri(),
    )
    attempt(found)
    assert len(found.lake.rows(T)) == 50  # the chunk was read instead
    assert "canary" not in found.values()
    found.maintain()
    assert contents(found.outside) == before


def entry(found: Planted) -> str:
    """The path of the newest entry of the log."""
    return str(found.one("select path from log_index order by start_offset desc limit 1"))


@pytest.mark.parametrize(
    "form",
    ["file://{}", "file:{}", "{base}/../../../../../..{}", "{base}/%2e%2e/{}", "s3://bucket{}"],
)
def test_a_staged_file_elsewhere_is_refused_by_name(copied: Planted, form: str) -> None:
    change(copied, "later")
    path = entry(copied)
    canary = copied.outside / "2026-01-01" / "a.parquet"
    canary.parent.mkdir()
    local = Path(path.removeprefix("file://"))
    canary.write_bytes(local.read_bytes())
    foreign = form.format(canary, base=str(local.parent.as_uri()))
    assert copied.plant("update log_index set path = %s where path = %s", foreign, path)
    with pytest.raises(TableProblem, match="no staged file") as refused:
        copied.lake.drain(T)
    assert repr(foreign) in str(refused.value)
    assert "later" not in copied.values()
    assert copied.plant("update log_index set path = %s where path = %s", path, foreign)
    copied.lake.drain(T)
    assert "later" in copied.values()


def test_a_staged_file_that_was_changed_is_refused_by_name(copied: Planted) -> None:
    """Whoever did it: the digest is of the bytes that the flusher wrote."""
    change(copied, "later")
    staged = Path(entry(copied).removeprefix("file://"))
    good = staged.read_bytes()
    rows = pq.read_table(staged)
    texts = [text.replace("later", "forged") for text in rows["_data"].to_pylist()]
    data = pa.array(texts, pa.large_string())
    forged = rows.set_column(rows.schema.get_field_index("_data"), "_data", data)
    pq.write_table(forged, staged)
    with pytest.raises(CdcError, match=r"isn't what the flusher wrote"):
        copied.lake.drain(T)
    assert not {"later", "forged"} & copied.values()
    staged.write_bytes(good)
    copied.lake.drain(T)
    assert "later" in copied.values()


def test_a_staged_file_of_an_earlier_version_has_no_digest_and_is_read(copied: Planted) -> None:
    change(copied, "later")
    copied.plant("update log_index set sha256 = null")
    copied.lake.drain(T)
    assert "later" in copied.values()


def led_astray(found: Planted, *, location: bool) -> None:
    """The catalog leads the table to metadata elsewhere, which names that place as the table's."""
    loaded = found.lake.lake_table(T).load()
    assert loaded is not None
    there = found.outside / "lake"
    here = Path(loaded.location().removeprefix("file://"))
    shutil.copytree(here, there)
    canary = there / "metadata" / "00000-canary.metadata.json"
    canary.write_text("{}")
    evil = there / "metadata" / Path(loaded.metadata_location).name
    data = json.loads(evil.read_text())
    if location:
        data = json.loads(json.dumps(data).replace(str(here), str(there)))
    data["metadata-log"] = [{"timestamp-ms": 1, "metadata-file": canary.as_uri()}]
    data["properties"] |= {
        "write.metadata.previous-versions-max": "1",
        "write.metadata.delete-after-commit.enabled": "true",
    }
    evil.write_text(json.dumps(data))
    assert found.plant("update iceberg_tables set metadata_location = %s", evil.as_uri())


@pytest.mark.parametrize("location", [True, False], ids=["its own location", "the table's"])
def test_a_catalog_that_leads_elsewhere_is_refused_by_name(copied: Planted, location: bool) -> None:
    good = copied.one("select metadata_location from iceberg_tables")
    led_astray(copied, location=location)
    before = contents(copied.outside)
    change(copied, "later")
    with pytest.raises(TableProblem, match=r"elsewhere than to .*/src/t.*delete from"):
        copied.lake.drain(T)
    assert "elsewhere than to" in str(copied.maintain().problem)
    with suppress(CdcError):
        copied.lake.verify()
    assert "elsewhere than to" in attempt(copied) or copied.lake.pipeline.store.table(T)
    assert contents(copied.outside) == before
    assert copied.plant("update iceberg_tables set metadata_location = %s", good)
    copied.lake.drain(T)
    assert "later" in copied.values()


def test_a_task_of_a_copy_knows_no_password_of_the_catalog(found: Planted) -> None:
    from cdc_assets.snapshot.landing import Landing

    found.lake.pin()
    row = found.lake.pipeline.store.table(T)
    assert row is not None
    landing = Landing(found.lake.config, found.lake.pipeline.store, row)
    landing.open()
    _, io = landing.place()
    assert not {"uri", "password", "token", "credential"} & set(io)
    assert "postgres" not in json.dumps(dict(io))
