"""Values that the lake can't hold are counted: of the copy at the source, then of every change."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from cdc_assets.config.source import SourceConfig
from cdc_assets.dagster.build import build_defs
from cdc_assets.dagster.names import all_tables
from cdc_assets.log.batch import BATCH_ROWS
from cdc_assets.log.staged.files import StagedRows
from cdc_assets.log.store import LogEntry
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.slots import current_lsn
from cdc_assets.verify import representable
from cdc_assets.verify.representable import unrepresentable
from cdc_assets_tests.support.lake import Lake, NewLake

pytestmark = pytest.mark.spark

T, PLAIN = TableId("public", "t"), TableId("public", "plain")
SETUP = """
set timezone = 'UTC';
create table t (id int primary key, d date, z timestamptz, z3 timestamp(3), n numeric(6, 2),
                "a b" int[], da date[], kept date, note text);
create table plain (id int primary key, note text);
insert into t values
  (1, '0001-01-01', '9999-12-31 23:59:59.999999+00', '2026-01-01', 1, '{1,NULL}',
   '{2026-01-01,NULL}', 'infinity', 'infinity'),
  (2, 'infinity', '-infinity', '0044-03-15 BC', 'NaN', '{{1},{2}}', '{infinity}', null, 'NaN'),
  (3, '10000-01-01', '10000-01-01 00:00:00+00', null, null, '[0:1]={1,2}', '{}', null, null),
  (4, null, null, null, null, null, null, null, null);
"""
BAD_IN_COPY = {"d": 2, "z": 2, "z3": 1, "n": 1, "a b": 2, "da": 1}


@pytest.fixture
def source(copied_lake: NewLake) -> Iterator[Lake]:
    tables = [{"name": "t", "columns": {"types": {"kept": "string"}}}, "plain"]
    with copied_lake(SETUP, *tables) as opened:
        yield opened


def test_what_has_no_form_in_the_lake_is_counted_once(source: Lake) -> None:
    def lost(table: TableId) -> dict[str, int]:
        return dict(unrepresentable(source.pipeline, source.session, source.lake_table(table)))

    assert lost(T) == BAD_IN_COPY
    assert lost(PLAIN) == {}
    source.execute('insert into t select id + 10, d, z, z3, n, "a b", da, kept, note from t')
    source.execute("update t set note = 'again' where id = 1; delete from t where id = 2")
    source.flush()
    assert lost(T) == {name: 2 * count for name, count in BAD_IN_COPY.items()}
    assert lost(T) == {name: 2 * count for name, count in BAD_IN_COPY.items()}, "nothing is new"

    # The same that the lake lacks: both halves of the type table agree with the count.
    source.drain(T)
    rows = {row[0]: row for row in source.rows(T)}
    assert rows[12][1:7] == (None, None, None, None, None, [None])
    assert rows[3][5] == rows[13][5] == [1, 2], (
        "of a list that doesn't begin at 1 only that is lost"
    )


def test_the_check_warns_and_names_the_columns(source: Lake) -> None:
    assert isinstance(source.config, SourceConfig)
    names = {n.table: n for n in all_tables(source.config)}
    job = build_defs(source.config).resolve_job_def("check_src_tables")
    with dg.DagsterInstance.ephemeral() as instance:
        done = job.execute_in_process(instance=instance)
        assert done.success
        found = {
            e.asset_key: e
            for e in done.get_asset_check_evaluations()
            if e.check_name == "values_representable"
        }
    bad, good = found[names[T].lake], found[names[PLAIN].lake]
    assert good.passed
    assert (bad.passed, bad.severity) == (False, dg.AssetCheckSeverity.WARN)
    assert "a b: 2, d: 2, da: 1, n: 1, z: 2, z3: 1" in (bad.description or "")


def test_what_one_table_has_keeps_no_other_from_being_looked_at(
    source: Lake, tmp_home: Path
) -> None:
    names = {n.table: n for n in all_tables(source.config)}
    job = build_defs(source.config).resolve_job_def("check_src_tables")
    shutil.rmtree(tmp_home / "src" / "warehouse" / "src" / "t" / "metadata")
    with dg.DagsterInstance.ephemeral() as instance:
        done = job.execute_in_process(instance=instance)
        assert done.success
        found = {(e.asset_key, e.check_name): e for e in done.get_asset_check_evaluations()}
    for check in ("primary_key_unique", "values_representable"):
        bad, good = found[names[T].lake, check], found[names[PLAIN].lake, check]
        assert (bad.passed, bad.severity, good.passed) == (False, dg.AssetCheckSeverity.WARN, True)
        assert "leads its lake table" in str(bad.description)


def test_a_look_is_bounded_by_bytes_and_not_by_what_one_merge_takes(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a table with many changes would never be caught up with, and its log goes after a day."""
    store, table = source.pipeline.store, source.lake_table(T)
    unrepresentable(source.pipeline, source.session, table)
    lsn, folder = current_lsn(source.source), f"{store.places[0].uri}/public.t"
    files = [StagedRows(T, f"{folder}/2026-01-01/{n}.parquet", BATCH_ROWS, 1000) for n in range(3)]
    store.register(files, lsn, lsn, store.server_now())
    looked = list[LogEntry]()

    def look(_: object, entries: list[LogEntry], *__: object) -> dict[str, int]:
        looked.extend(entries)
        return {}

    monkeypatch.setattr(representable, "_in_log", look)
    unrepresentable(source.pipeline, source.session, table)
    assert len(looked) == len(files)
