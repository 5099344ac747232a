"""A lost reply to a commit neither makes a table unreadable nor stops its maintenance."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from unittest.mock import patch

import psycopg
import pytest
from pyiceberg.table.snapshots import Snapshot
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from cdc_assets.errors import EnvironmentProblem, TableProblem
from cdc_assets.lake.lost_reply import before_lost_rewrite, is_readable
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.lake.tables import RETRIES
from cdc_assets.maintenance import expire, plan
from cdc_assets.maintenance.compact import tidy_metadata
from cdc_assets.maintenance.run import Maintained
from cdc_assets.materializer.schema import alter
from cdc_assets.pipeline import Pipeline
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.integration.maintenance.care import (
    SETUP,
    M,
    cycle,
    equals_the_source,
    maintained,
    settings,
)
from cdc_assets_tests.support.lake import Lake, lake
from cdc_assets_tests.support.lost_reply import LosingLine

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


@pytest.fixture
def line(postgres_dsn: NewDatabase) -> Iterator[LosingLine]:
    with LosingLine(postgres_dsn()) as opened:
        yield opened


@pytest.fixture
def source(line: LosingLine, spark_server: SparkServer, tmp_home: Path) -> Iterator[Lake]:
    """A table with some merges, whose catalog is reached by ``line``."""
    catalog = {"catalog": {"type": "sql", "uri": line.dsn}}
    with lake(line.server_dsn, spark_server.ensure(), SETUP, "m", lake=catalog) as opened:
        opened.pin()
        opened.copy()
        for i in range(3):
            cycle(opened, i)
        yield opened


def head(source: Lake) -> Snapshot:
    current = source.lake_table(M).loaded().current_snapshot()
    assert current is not None
    return current


def lose_files(snapshot: Snapshot) -> None:
    """As Iceberg's clean-up does."""
    Path(snapshot.manifest_list.removeprefix("file:")).unlink()


def lose_a_rewrite(source: Lake) -> None:
    """As a run does that dies before it could undo it."""
    name = source.lake_table(M).procedure_name
    source.session.sql(f"call lake.system.rewrite_manifests({name}, false)").collect()
    lose_files(head(source))
    assert not is_readable(source.lake_table(M).loaded())


def cared_for(source: Lake) -> Maintained:
    with settings(source, keep_snapshots={"count": 1, "age": "0s"}) as pipeline:
        return maintained(source, pipeline)[M]


@pytest.mark.parametrize("retries", [4, 0])
def test_a_rewrite_of_manifests_that_is_lost_is_undone(
    source: Lake, line: LosingLine, retries: int
) -> None:
    table = source.lake_table(M)
    source.session.sql(f"alter table {table.sql_name} set tblproperties ('{RETRIES}'='{retries}')")
    before = head(source)
    line.lose_reply("m")
    with patch.object(plan, "MANY_MANIFESTS", 1), pytest.raises(PySparkException):
        tidy_metadata(source.pipeline.store, table, lambda: source.session)
    assert line.lost == 1
    assert head(source).snapshot_id == before.snapshot_id
    equals_the_source(source)
    cycle(source, 4)
    equals_the_source(source)


def test_a_run_that_lost_its_lock_undoes_nothing_and_the_next_one_does(
    source: Lake, line: LosingLine
) -> None:
    store = source.pipeline.store

    def session() -> SparkSession:
        pid = store.connection.info.backend_pid
        source.execute(f"select pg_terminate_backend({pid}, 5000)")
        return source.session

    line.lose_reply("m")
    with patch.object(plan, "MANY_MANIFESTS", 1), pytest.raises(psycopg.OperationalError):
        tidy_metadata(store, source.lake_table(M), session)
    assert line.lost == 1
    with Pipeline.open(source.config) as source.pipeline:
        assert not is_readable(source.lake_table(M).loaded())
        cared_for(source)
        equals_the_source(source)


def test_maintenance_undoes_what_a_run_before_lost(source: Lake) -> None:
    lose_a_rewrite(source)
    assert cared_for(source).compacted.slices > 0
    equals_the_source(source)
    cycle(source, 4)
    assert cared_for(source).expired.snapshots > 0
    equals_the_source(source)


@pytest.mark.parametrize("before", ["select 1", "alter table m add w int default 7"])
def test_a_merge_that_fails_for_it_succeeds_the_next_time(source: Lake, before: str) -> None:
    lose_a_rewrite(source)
    source.execute(before)
    with pytest.raises(PySparkException):
        cycle(source, 4)
    source.drain(M)
    equals_the_source(source)


def test_a_commit_that_changed_rows_is_never_undone(source: Lake) -> None:
    at = head(source).snapshot_id
    lose_files(head(source))
    assert before_lost_rewrite(source.lake_table(M).loaded()) is None
    with pytest.raises(PySparkException):
        cycle(source, 4)
    assert head(source).snapshot_id == at


def test_an_alteration_that_is_ended_and_fails_for_it_succeeds_the_next_time(
    source: Lake,
) -> None:
    """A writer dies before it filled a column: the next one fills it before anything else."""
    source.execute("alter table m add w int default 7; insert into m select max(id) + 1 from m")
    source.flush()
    died = psycopg.OperationalError("it died")
    with patch.object(alter, "fill", side_effect=died), pytest.raises(psycopg.OperationalError):
        source.drain(M)
    lose_a_rewrite(source)
    with pytest.raises(PySparkException):
        source.drain(M)
    source.drain(M)
    equals_the_source(source)


def test_a_rewrite_is_not_undone_where_the_table_lost_more(source: Lake) -> None:
    before = head(source)
    lose_a_rewrite(source)
    lose_files(before)
    assert before_lost_rewrite(source.lake_table(M).loaded()) is None


def test_a_merge_that_loses_any_reply_is_made_once(source: Lake, line: LosingLine) -> None:
    for after, step in enumerate(["draft", "deletes", "rows", "publishing"]):
        source.execute(f"update m set v = '{step}' where id % 4 = {after}")
        source.flush()
        line.lose_reply("m", after=after)
        with suppress(PySparkException, EnvironmentProblem):
            source.drain(M)
        assert line.lost == after + 1
        source.drain(M)
        equals_the_source(source)


@pytest.mark.parametrize("kind", ["table", "branch"])
def test_care_goes_on_past_the_remains_of_a_merge(
    source: Lake, line: LosingLine, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """However long snapshots are kept: no orphan would be found beside them.

    Of a draft that is a table none is left.
    """
    if kind == "branch":
        monkeypatch.setattr("cdc_assets.lake.publish.table_draft", lambda *_: None)
    source.execute("delete from m where id = 50")
    source.flush()
    line.lose_reply("m", after=1)  # it makes a draft, and then deletes the rows there
    with pytest.raises(PySparkException):
        source.drain(M)
    assert line.lost == 1
    source.drain(M)
    snapshots = source.lake_table(M).loaded().metadata.snapshots
    lost = [s for s in snapshots if not Path(s.manifest_list.removeprefix("file:")).exists()]
    assert len(lost) == (kind == "branch")
    with settings(source, keep_snapshots={"count": 1, "age": "7d"}) as pipeline:
        assert maintained(source, pipeline)[M].problem is None
    assert source.snapshots(M) >= len(snapshots) - len(lost)
    left = source.lake_table(M).loaded().metadata.snapshots
    assert not {s.snapshot_id for s in lost} & {s.snapshot_id for s in left}
    assert cared_for(source).expired.snapshots > 0
    assert source.snapshots(M) <= 3
    equals_the_source(source)


def test_nothing_is_expired_of_a_table_that_is_somebody_elses(
    source: Lake, line: LosingLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdc_assets.lake.publish.table_draft", lambda *_: None)  # a branch
    source.execute("delete from m where id = 50")
    source.flush()
    line.lose_reply("m", after=1)
    with pytest.raises(PySparkException):
        source.drain(M)
    source.drain(M)
    ids = {s.snapshot_id for s in source.lake_table(M).loaded().metadata.snapshots}
    refused = patch.object(expire, "refuse_misled", side_effect=TableProblem(M, "it isn't ours"))
    with refused, pytest.raises(TableProblem):
        expire.expire_snapshots(source.lake_table(M), lambda: source.session, datetime.now(UTC))
    assert {s.snapshot_id for s in source.lake_table(M).loaded().metadata.snapshots} == ids
