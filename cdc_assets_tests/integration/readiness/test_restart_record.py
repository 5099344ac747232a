"""Each mismatch between log and source, made for real: it is named, nothing streams, resync heals.

What concerns one table parks that table only. The log is looked at, not the lake: copies are in
``snapshot/test_beside_a_stream.py``.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import psycopg
import pytest
from click.testing import CliRunner

from cdc_assets.cli.main import cli
from cdc_assets.config.source import SourceConfig
from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.errors import SourceMismatch
from cdc_assets.flusher import registrar, reviewer
from cdc_assets.operations.copying import mark_for_copy
from cdc_assets.pins.pins import Pins
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.slots import current_lsn
from cdc_assets.readiness.source.server import preflight
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.support.flusher import Bench, bench, flushing
from cdc_assets_tests.support.waiting import wait_for

TABLES = ("public.t", "public.u")
STATES = "select table_name, state from _pg2iceberg.tables"
SETUP = "create table t (id int primary key, v text); create table u (id int primary key, v text)"


@pytest.fixture
def source(source: Bench) -> Bench:
    source.execute(SETUP)
    return source


def codes(source: Bench, config: SourceConfig) -> set[str]:
    """The errors that ``check`` names; it changes nothing."""
    path = source.folder / "check.json"
    path.write_text(config.dump())
    result = CliRunner().invoke(cli, ["--config", str(path), "check", "--json"])
    found = json.loads(result.stdout)
    return {finding["code"] for finding in found if finding["severity"] == "error"}


def refused(source: Bench, config: SourceConfig, *expected: str) -> None:
    """Nothing streams, twice; all of it is named, with a way out, by ``check`` too."""
    flushed = source.flushed()
    for _ in range(2):
        with pytest.raises(SourceMismatch, match="resync") as caught:
            source.flush(config)
        assert caught.value.codes == expected
        assert all(code in str(caught.value) for code in expected)
    assert source.flushed() == flushed
    assert set(expected) <= codes(source, config)


def healed(source: Bench, config: SourceConfig) -> None:
    """After ``resync --all`` every change is in the log, once."""
    source.resync(config)
    assert source.ask_log("select state from _pg2iceberg.tables") == [("streaming",)] * 2
    source.execute("insert into t values (100, 'after'); insert into u values (100, 'after')")
    source.execute("update u set v = 'again' where id = 100")
    source.flush(config)
    assert source.ids() == ["100"]
    assert source.ids("public.u") == ["100", "100"]
    assert codes(source, config) == set()


def started(source: Bench) -> SourceConfig:
    config = source.config(*TABLES)
    with Pipeline.open(config) as pipeline:
        pins = Pins(pipeline)
        pins.prepare()
        pins.tick()
        pins.close()
    source.execute("set synchronous_commit = on")  # what is committed is in the WAL's file
    source.execute("insert into t values (1, 'before')")
    source.flush(config)
    assert source.ids() == ["1"]
    source.execute("insert into t values (2, 'missed'); insert into u values (2, 'missed')")
    ended = "select 1 from pg_replication_slots where slot_name = %s and not active"
    wait_for(lambda: bool(source.execute(ended, config.slot)), 30)  # the server notices it later
    return config


# --- the source's ---

_AGAIN = "select pg_create_logical_replication_slot('{slot}', 'pgoutput')"
_DROP = "select pg_drop_replication_slot('{slot}')"


_ADVANCE = "select pg_replication_slot_advance('{slot}', pg_current_wal_lsn())"
_UNPUBLISH = "drop publication {slot}"
_PUBLISH = "create publication {slot} for table t"


@pytest.mark.parametrize(
    ("postgres_version", "code", "provoke"),
    [
        pytest.param(15, "slot_gone", [_DROP], id="gone"),
        pytest.param(18, "slot_moved", [_ADVANCE], id="advanced"),
        pytest.param(16, "slot_moved", [_DROP, _AGAIN], id="made again"),
        pytest.param(18, "publication_gone", [_UNPUBLISH], id="publication gone"),
        pytest.param(
            15, "publication_gone", [_UNPUBLISH, _PUBLISH], id="publication made again 15"
        ),
        pytest.param(
            18, "publication_gone", [_UNPUBLISH, _PUBLISH], id="publication made again 18"
        ),
    ],
)
def test_a_mismatch_of_the_source(source: Bench, code: str, provoke: list[str]) -> None:
    config = started(source)
    for statement in provoke:
        source.execute(statement.format(slot=config.slot))
    refused(source, config, code)
    healed(source, config)


def test_all_mismatches_are_named_at_once(source: Bench) -> None:
    config = started(source)
    source.execute(f"drop publication {config.publication}")
    source.drop_slot()
    refused(source, config, "slot_gone", "publication_gone")
    healed(source, config)


def test_a_physical_slot_of_the_name_is_not_ours_to_drop(source: Bench) -> None:
    config = started(source)
    source.drop_slot()
    source.execute("select pg_create_physical_replication_slot(%s)", config.slot)
    refused(source, config, "slot_plugin")
    with pytest.raises(SourceMismatch, match="slot_plugin"):
        source.resync(config)
    source.drop_slot()  # as the remedy says
    healed(source, config)


def test_a_slot_of_another_database_is_not_ours_to_drop(source: Bench) -> None:
    config = started(source)
    source.drop_slot()
    with psycopg.connect(source.dsn, dbname="postgres", autocommit=True) as other:
        other.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (config.slot,))
        try:
            refused(source, config, "slot_database")
            renamed = config.model_copy(update={"slot": f"{config.slot[:40]}_b"})
            healed(source, renamed)  # the other remedy
        finally:
            other.execute("select pg_drop_replication_slot(%s)", (config.slot,))


def test_another_database_of_the_name(
    postgres: EmbeddedPostgres, postgres_dsn: NewDatabase, tmp_path: Path
) -> None:
    dsn = postgres.dsn()
    assert dsn is not None
    with bench(dsn, "r_again", tmp_path, postgres_dsn()) as source:
        source.execute(SETUP)
        config = started(source)
        source.drop_slot()
        source.connection.close()
        with psycopg.connect(dsn, autocommit=True) as admin:
            admin.execute("drop database r_again with (force)")
            admin.execute("create database r_again")
        source.connection = psycopg.connect(source.dsn, autocommit=True)
        source.execute(SETUP)
        refused(source, config, "other_database", "slot_gone", "publication_gone")
        healed(source, config)
        source.connection.close()


def test_what_the_coordination_database_forgot_begins_anew(source: Bench) -> None:
    config = started(source)
    source.execute("drop schema _pg2iceberg cascade")
    source.flush(config)  # the slot is there: tables get pins of their own, later than it
    source.execute("insert into t values (3, 'after')")
    source.flush(config)
    assert source.ids()[-1] == "3"


# --- a table's ---


def flows(source: Bench, config: SourceConfig, number: int) -> None:
    source.execute("insert into u values (%s, 'flows')", number)
    source.flush(config)
    assert source.ids("public.u")[-1] == str(number)


def alone(source: Bench, config: SourceConfig, code: str, remedy: str = "") -> None:
    """Only t is parked, by that name; u flows; the remedy works, and t is whole again."""
    with Pipeline.open(config) as pipeline:
        found = preflight(source.connection, config, pipeline.store, source.dsn)
    assert {f.table for f in found if f.code == code} == {"public.t"}
    assert "table_missing" not in {f.code for f in found}
    assert code in codes(source, config)
    flows(source, config, 50)
    parked = source.parked()
    assert list(parked) == ["public.t"]
    assert parked["public.t"].startswith(f"{code}: ")
    assert "resync public.t" in parked["public.t"]
    if remedy:
        source.execute(remedy)
    source.resync(config, "public.t")
    assert source.parked() == {}
    source.execute("insert into t values (200, 'after')")
    flows(source, config, 51)
    assert source.ids()[-1:] == ["200"]
    assert source.ids("public.u") == ["2", "50", "51"]
    assert codes(source, config) == set()


_T = "(id int primary key, v text)"


@pytest.mark.parametrize(
    ("postgres_version", "code", "provoke", "remedy"),
    [
        (18, "table_dropped", "drop table t", f"create table t {_T}"),
        (16, "table_recreated", f"drop table t; create table t {_T}", ""),
        (18, "table_renamed", "alter table t rename to moved", "alter table moved rename to t"),
        (15, "table_unpublished", "alter publication {p} drop table t", ""),
        (
            18,
            "table_republished",
            "alter publication {p} drop table t; alter publication {p} add table t",
            "",
        ),
        # Already in the publication's entry when it was pinned, the filter can't be added to it:
        # a new entry, and so what was changed in between isn't known.
        (18, "table_republished", "alter publication {p} set table t where (id > 0), u", "{d}"),
        (15, "table_republished", "alter publication {p} set table t (id), u", "{d}"),
    ],
)
def test_a_mismatch_of_one_table(source: Bench, code: str, provoke: str, remedy: str) -> None:
    config = started(source)
    words = {"p": config.publication, "d": f"alter publication {config.publication} drop table t"}
    for statement in provoke.format(**words).split(";"):
        source.execute(statement)
    alone(source, config, code, remedy.format(**words))


def _streams(source: Bench, table: str) -> None:
    wait_for(lambda: (table, "streaming") in source.ask_log(STATES))


def _staged(source: Bench) -> None:
    """What is committed now."""
    written = current_lsn(source.connection)
    wait_for(lambda: source.flushed() >= written)


def test_a_parked_table_s_changes_fill_no_staging_place(
    source: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A re-sync, which alone ends it, copies them; from its pin on they are in the log."""
    monkeypatch.setattr(registrar, "REFRESH_SECONDS", 0.3)
    monkeypatch.setattr(registrar, "IDLE_STEP_SECONDS", 0.3)  # nothing of it is registered
    config = started(source)
    source.flush(config)
    t = TableId("public", "t")
    with flushing(config) as progress, Pipeline.open(config) as pipeline:
        wait_for(lambda: progress.state == "streaming")
        for number in (10, 20):
            pipeline.store.park(t, "resync it")
            time.sleep(2 * registrar.REFRESH_SECONDS)
            source.execute(f"insert into t values ({number})")
            _staged(source)
            mark_for_copy(pipeline, [t])
            _streams(source, "public.t")
            source.execute(f"insert into t values ({number + 1})")
            _staged(source)
    assert source.ids() == ["1", "2", "11", "21"]


def test_a_table_s_new_name_gets_its_changes(source: Bench) -> None:
    """Whichever name comes first in the alphabet, and when the old one comes back."""
    started(source)
    for number, (old, new) in enumerate((("t", "a"), ("a", "t")), 10):
        source.execute(f"alter table {old} rename to {new}")
        config = source.config(f"public.{new}", "public.u")
        with flushing(config):
            _streams(source, f"public.{new}")
            source.execute(f"insert into {new} values ({number})")
            _staged(source)
        assert source.ids(f"public.{new}")[-1:] == [str(number)]
        assert list(source.parked()) == [f"public.{old}"]


def test_a_partial_publication_that_was_there_before_it_was_written_down(source: Bench) -> None:
    """As after an upgrade: the entry isn't known, its filter is."""
    config = started(source)
    source.execute(f"alter publication {config.publication} set table t where (id > 0), u")
    source.execute("update _pg2iceberg.tables set published_as = null")
    drop = f"alter publication {config.publication} drop table t"
    alone(source, config, "publication_row_filter", drop)


def test_a_publication_that_leaves_out_kinds_of_changes_parks_all_tables(source: Bench) -> None:
    config = started(source)
    name = config.publication
    source.execute(f"alter publication {name} set (publish = 'insert')")
    source.flush(config)
    assert {r.split(":")[0] for r in source.parked().values()} == {"publication_operations"}
    source.execute(f"alter publication {name} set (publish = 'insert, update, delete, truncate')")
    source.flush(config)
    assert len(source.parked()) == 2  # what was changed meanwhile is missing: still parked
    source.resync(config)
    source.execute("update t set v = 'after'")
    source.flush(config)
    assert [row.op for row in source.log("public.t")][-2:] == ["U", "U"]
    assert source.parked() == {}


def test_a_table_taken_out_while_the_flusher_runs(
    source: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reviewer, "REVIEW_SECONDS", 1.0)
    config = started(source)
    with flushing(config):
        wait_for(lambda: source.ids() == ["1", "2"])
        source.execute(f"alter publication {config.publication} drop table t")
        wait_for(lambda: source.parked().get("public.t", "").startswith("table_unpublished"))
        source.execute("insert into u values (3, 'flows')")
        wait_for(lambda: source.ids("public.u") == ["2", "3"])
        source.resync(config, "public.t")
        source.execute("insert into t values (200, 'after')")
        wait_for(lambda: source.ids()[-1] == "200")


def test_a_publication_dropped_while_the_flusher_runs_ends_it(
    source: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reviewer, "REVIEW_SECONDS", 1.0)
    config = started(source)

    def drop() -> None:
        with flushing(config) as progress:
            wait_for(lambda: source.ids() == ["1", "2"])
            source.execute(f"drop publication {config.publication}")
            wait_for(lambda: progress.state == "stopped")

    with pytest.raises(SourceMismatch, match="publication_gone"):
        drop()
    healed(source, config)
