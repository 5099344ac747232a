"""Maintenance on a real lake: rows stay, files go, whoever else works and wherever it dies.

The tests share one source; each makes the changes that it needs, and ends with equal rows.
"""

from __future__ import annotations

import json
import math
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from click.testing import CliRunner

from cdc_assets.cli.main import cli
from cdc_assets.dagster.build import build_defs
from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.errors import TableProblem
from cdc_assets.lake.copies import SUFFIX, create_for_copy
from cdc_assets.lake.drafts.branches import PREFIX
from cdc_assets.lake.drafts.tables import TableDraft
from cdc_assets.lake.lineage import OFFSET
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.lake.spark.session import open_session
from cdc_assets.lake.tables import RETRIES, LakeTable
from cdc_assets.log.copies.chunks import restart_copy
from cdc_assets.log.locks import write_lock
from cdc_assets.maintenance import plan
from cdc_assets.maintenance.compact import Busy, compact
from cdc_assets.maintenance.expire import remove_orphans
from cdc_assets.maintenance.run import maintain
from cdc_assets.materializer.drain import drain
from cdc_assets.pipeline import Pipeline
from cdc_assets.snapshot.coordinator import copy_table
from cdc_assets_tests.conftest import databases
from cdc_assets_tests.integration.maintenance.care import (
    SETUP,
    M,
    P,
    age,
    cycle,
    equals_the_source,
    files,
    main,
    maintained,
    no_session,
    settings,
)
from cdc_assets_tests.support.lake import Lake, copied

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def source(
    postgres: EmbeddedPostgres, spark_server: SparkServer, public_directory: Path
) -> Iterator[Lake]:
    home = tempfile.mkdtemp(prefix="care-", dir=public_directory)
    with pytest.MonkeyPatch.context() as patch, databases(postgres) as new:
        patch.setenv("CDC_ASSETS_HOME", home)
        tables = ("m", {"name": "p", "partition_by": ["part"]})
        with copied(new(), spark_server.ensure(), SETUP, *tables) as opened:
            yield opened


def test_invariants_7_and_9_compaction_keeps_rows_keys_and_the_cursor(source: Lake) -> None:
    for i in range(2):
        cycle(source, i)
    before = {table: source.lake_table(table).state().cursor for table in source.tables}
    with settings(source) as pipeline:
        done = maintained(source, pipeline, thorough=False)
        for table in (M, P):
            assert done[table].compacted.rewritten_files >= 2
            assert done[table].compacted.applied_deletes > 0
            assert done[table].deleted_rows == 0
            assert OFFSET in main(source, table)[1]
            assert source.lake_table(table).state().cursor == before[table]
        assert done[M].data_files == 1
        assert done[P].data_files == 3  # one a partition, as its spec has it
        equals_the_source(source)
        # Nothing to do makes no snapshot, and no Spark.
        heads = {table: main(source, table) for table in source.tables}
        list(maintain(pipeline, no_session, source.tables, thorough=False))
        assert {table: main(source, table) for table in source.tables} == heads
    cycle(source, 3)
    equals_the_source(source)


def test_invariant_7_an_earlier_copy_stays_one_whatever_is_compacted(source: Lake) -> None:
    """It was set back while a merge kept maintenance from looking at its cursor."""

    def copied_anew() -> None:
        row = source.row(M)
        restart_copy(source.pipeline.store, row)
        source.pin()
        copy_table(source.pipeline, source.session, M)

    for i in range(2):
        cycle(source, i, M)
    earlier, _ = main(source, M)
    copied_anew()
    source.session.sql(f"call lake.system.rollback_to_snapshot('lake.src.m', {earlier})")
    with settings(source) as pipeline, suppress(Busy):
        again = replace(source.lake_table(M), config=pipeline.config)
        compact(pipeline.store, again, lambda: source.session, until=math.inf)
    with pytest.raises(TableProblem, match="set back to an earlier copy"):
        source.drain(M)
    copied_anew()
    equals_the_source(source, M)


@pytest.mark.parametrize("broken", ["a row comes back", "a row becomes another"])
def test_compaction_that_would_change_rows_is_given_up_and_nobody_sees_it(
    source: Lake, broken: str
) -> None:
    cycle(source, 4, M)
    cycle(source, 5, M)
    head = main(source, M)

    class Breaking:
        """A session whose compaction does what others' was seen to do."""

        def __getattr__(self, name: str) -> Any:
            return getattr(source.session, name)

        def sql(self, statement: str) -> Any:
            found = source.session.sql(statement)
            if "rewrite_data_files" in statement:
                row = found.collect()
                target = statement.split("table => '")[1].split("'", maxsplit=1)[0]
                if broken == "a row becomes another":
                    source.session.sql(f"delete from {target} where id = 400")
                source.session.sql(f"insert into {target} values (-1, 'back')")
                return type("Rows", (), {"first": lambda _: row[0]})()
            return found

    with settings(source) as pipeline:
        session: Any = Breaking()
        table = source.lake_table(M)
        changed = LakeTable(pipeline.config, table.table, table.row)
        with pytest.raises(TableProblem, match="compaction would have changed its rows"):
            compact(pipeline.store, changed, lambda: session, until=time.monotonic() + 20)
        assert not pipeline.store.is_locked(write_lock(M))
        assert main(source, M) == head
        # The next run drops the branch that was left, and does it right.
        done = maintained(source, pipeline, M, thorough=False)
    loaded = table.load()
    assert loaded is not None
    assert not [name for name in loaded.metadata.refs if name.startswith(PREFIX)]
    assert done[M].data_files == 1
    equals_the_source(source, M)


def test_a_run_that_dies_at_any_statement_is_done_again_by_the_next(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    cycle(source, 30, M)
    cycle(source, 31, M)

    class Dying:
        """A session of a run that is killed before, or right after, a statement."""

        def __init__(self, at: str, *, after: bool) -> None:
            self._at, self._after = at, after

        def __getattr__(self, name: str) -> Any:
            return getattr(source.session, name)

        def sql(self, statement: str) -> Any:
            if self._at in statement:
                if self._after:
                    source.session.sql(statement)
                raise KeyboardInterrupt
            return source.session.sql(statement)

    publish = TableDraft.publish

    with settings(source, keep_snapshots={"count": 1, "age": "0s"}) as pipeline:
        for at, after in [
            ("rewrite_data_files", True),
            ("publish", False),
            ("publish", True),
            ("expire_snapshots", False),
        ]:

            def dying(draft: TableDraft, after: bool = after) -> None:
                if after:
                    publish(draft)
                raise KeyboardInterrupt

            session: Any = Dying(at, after=after)
            with monkeypatch.context() as patched:
                if at == "publish":
                    patched.setattr(TableDraft, "publish", dying)
                with pytest.raises(KeyboardInterrupt):
                    list(maintain(pipeline, lambda: session, [M], thorough=False))  # noqa: B023
            assert not pipeline.store.is_locked(write_lock(M))
            equals_the_source(source, M)
        found = maintained(source, pipeline, M, thorough=False)[M]
    assert (found.data_files, found.deleted_rows, found.snapshots) == (1, 0, 1)
    loaded = source.lake_table(M).load()
    assert loaded is not None and list(loaded.metadata.refs) == ["main"]
    cycle(source, 32, M)
    equals_the_source(source, M)


def test_invariant_7_expiry_keeps_the_cursor_and_the_settings_decide(source: Lake) -> None:
    cycle(source, 6, P)
    cycle(source, 7, P)
    with settings(source) as pipeline:
        assert maintained(source, pipeline, P, thorough=False)[P].expired.snapshots == 0
    source.session.sql("insert into lake.src.p select * from lake.src.p limit 0")  # says nothing
    assert OFFSET not in main(source, P)[1]
    cursor = source.lake_table(P).state().cursor
    before = len(files(source, P))
    with settings(source, keep_snapshots={"count": 1, "age": "0s"}) as pipeline:
        found = maintained(source, pipeline, P, thorough=False)[P]
    assert found.expired.snapshots > 4
    assert found.expired.files > 4
    assert found.expired.bytes > 0
    assert found.snapshots == 1
    assert OFFSET in main(source, P)[1]  # it was carried on
    assert len(files(source, P)) < before
    assert source.lake_table(P).state().cursor == cursor
    equals_the_source(source, P)
    with settings(source, staged_grace="0s") as pipeline:
        found = maintained(source, pipeline, P, thorough=False)[P]
        assert found.staged.bytes > 0
        assert pipeline.store.entries(P, 0) == []
        assert found.staged.files == 0  # they are shared with m, which hasn't read them
        source.drain(M)
        found = maintained(source, pipeline, M, thorough=False)[M]
        assert found.staged.files >= 2
        assert pipeline.store.entries(M, 0) == []
    cycle(source, 8, P)
    equals_the_source(source, P)


def test_metadata_is_limited_and_manifests_are_put_together(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(20, 24):
        cycle(source, i, M)
    property_ = "write.metadata.delete-after-commit.enabled"
    source.session.sql(f"alter table lake.src.m unset tblproperties ('{property_}')")
    source.session.sql(f"alter table lake.src.m set tblproperties ('{RETRIES}' = '0')")
    monkeypatch.setattr(plan, "MANY_MANIFESTS", 2)
    cursor = source.lake_table(M).state().cursor
    with settings(source, min_input_files=1000, deleted_rows=0.99) as pipeline:
        found = maintained(source, pipeline, M, thorough=False)[M].compacted
    assert 0 < found.manifests_after < found.manifests_before
    assert OFFSET in main(source, M)[1]
    assert source.lake_table(M).state().cursor == cursor
    loaded = source.lake_table(M).load()
    assert loaded is not None and loaded.properties[property_] == "true"
    assert loaded.properties[RETRIES] != "0"
    equals_the_source(source, M)


def test_orphans_go_when_they_are_old_and_no_copy_runs(source: Lake) -> None:
    cycle(source, 9, M)
    age(files(source, M))
    with settings(source) as pipeline:
        maintained(source, pipeline, M)  # what earlier tests left
    live = files(source, M)
    data = next(path for path in live if path.parent.name == "data").parent
    old, young = data / "0001-old.parquet", data / "0001-young.parquet"
    for path in (old, young):
        path.write_bytes(b"left behind")
    age([*live, old])
    row = source.row(M)
    suffix = f"{SUFFIX}{row.epoch}"
    shadow = LakeTable(
        source.config, source.config.table(M), source.lake_table(M).row, suffix=suffix
    )
    create_for_copy(shadow)
    assert shadow.location is not None
    left = Path(shadow.location.removeprefix("file://")) / "data" / "0001-left.parquet"
    left.parent.mkdir(parents=True, exist_ok=True)
    left.write_bytes(b"left")
    age([left])
    with settings(source) as pipeline:
        source.execute(
            "update _pg2iceberg.tables set state = 'copying' where table_name = 'public.m'"
        )
        found = maintained(source, pipeline, M)[M]
        assert found.left_alone == "it is copying"
        assert old.exists() and left.exists() and shadow.load() is not None
        source.execute(
            "update _pg2iceberg.tables set state = 'streaming' where table_name = 'public.m'"
        )
        found = maintained(source, pipeline, M)[M]
    assert not old.exists() and young.exists()
    assert (found.orphans.files, found.orphans.bytes) == (1, len(b"left behind"))
    assert shadow.load() is None
    assert not left.parent.parent.exists()
    assert found.dead_copies.files > 1
    equals_the_source(source, M)
    with settings(source, orphan_grace="30d") as pipeline:
        age([young])
        assert maintained(source, pipeline, M)[M].orphans.files == 0


def test_orphans_go_where_spark_has_an_earlier_clock(source: Lake) -> None:
    """By its own clock Iceberg refuses to remove what is younger than a day."""
    with settings(source, orphan_grace="1d") as pipeline:
        lake = LakeTable(pipeline.config, pipeline.config.table(M), source.row(M))
        ahead = pipeline.store.server_now() + timedelta(minutes=5)
        remove_orphans(pipeline.store, lake, lambda: source.session, ahead)


def test_merges_and_compaction_go_on_beside_each_other(source: Lake) -> None:
    """Neither fails because of the other, and neither is kept waiting for ever."""
    stop, errors, merges = threading.Event(), list[BaseException](), list[int]()

    def merge() -> None:
        session = open_session(source.config)
        try:
            with Pipeline.open(source.config) as own:
                while not stop.is_set():
                    drained = drain(own, session, M)
                    if drained is None:
                        time.sleep(0.5)  # as a command does
                    else:
                        merges.append(drained.merges)
        except BaseException as error:  # noqa: BLE001 - shown by the test's own thread
            errors.append(error)
        finally:
            session.stop()

    thread = threading.Thread(target=merge)
    thread.start()
    try:
        slices = 0
        with settings(source) as pipeline:
            for i in range(3):
                for j in range(2):
                    source.execute(f"update m set v = 'b{i}{j}' where id % 5 = {j}")
                    source.execute(f"insert into m values ({2000 + 2 * i + j}, 'beside')")
                    source.flush()
                slices += maintained(source, pipeline, M, thorough=False)[M].compacted.slices
    finally:
        stop.set()
        thread.join(300)
    assert not errors
    assert sum(merges) >= 2
    assert slices >= 1
    source.drain(M)
    equals_the_source(source, M)


def test_a_run_reports_each_table_and_the_command_prints_it(source: Lake, tmp_path: Path) -> None:
    cycle(source, 10, M)
    defs = build_defs(source.config)
    instance = dg.DagsterInstance.local_temp(str(tmp_path))
    instance.add_dynamic_partitions("ctid/src.public.m", ["0000:0000000000-end"])
    with dg.build_schedule_context(instance) as context:
        tick = defs.resolve_schedule_def("maintenance_src").evaluate_tick(context)
    (request,) = tick.run_requests or ()
    job = defs.resolve_job_def("maintain_src_tables")
    result = job.execute_in_process(instance=instance, tags=dict(request.tags))
    assert result.success
    key = dg.AssetKey(["maintenance", "src", "public", "m"])
    (event,) = instance.fetch_materializations(key, limit=10).records
    assert event.asset_materialization is not None
    metadata: dict[str, Any] = {k: v.value for k, v in event.asset_materialization.metadata.items()}
    assert metadata["data files"] >= 1
    assert metadata["snapshots"] >= 1
    assert metadata["removed files"] == 0  # of default graces
    assert metadata["partition keys removed"] == 1
    assert not instance.get_dynamic_partitions("ctid/src.public.m")
    path = tmp_path / "src.json"
    path.write_text(source.config.dump())
    ran = CliRunner().invoke(cli, ["--config", str(path), "maintain", "--table", "m", "--json"])
    assert ran.exit_code == 0, ran.output
    (found,) = json.loads(ran.stdout)
    assert (found["table"], found["problem"]) == ("public.m", None)
    assert {"rewritten_files", "expired_snapshots", "orphans_files", "staged_bytes"} <= set(found)
