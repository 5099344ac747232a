"""What is read at the source for a schema change: later than the log, or not visible yet, or lost.

The values of an added column that each row has of its own are read as they are now; the columns of
a transaction that altered the table are in the log before the catalog shows them.
"""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest

from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.errors import TableProblem
from cdc_assets.flusher.flusher import run
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.materializer import reread
from cdc_assets.materializer.drain import drain
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.slots import current_lsn
from cdc_assets.verify import together
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.integration.snapshot.sources import T
from cdc_assets_tests.support.lake import Lake, NewLake, lake
from cdc_assets_tests.support.synchronous import hanging_commits
from cdc_assets_tests.support.waiting import wait_for

pytestmark = pytest.mark.spark

TABLE = """
create table t (id int primary key, v varchar(20));
insert into t select i, 'v' || i from generate_series(1, 9) i;
"""
# Each row has a value of its own, out of line.
LONG = """
create function long() returns text language sql volatile as
  $$ select string_agg(md5(random()::text || i), '') from generate_series(1, 200) i $$;
"""
MOVED = "update t set id = 104 where id = 4"
SWAPPED = """
update t set id = 1000 where id = 4; update t set id = 4 where id = 5;
update t set id = 5 where id = 1000
"""


@pytest.mark.parametrize("moves", [MOVED, SWAPPED], ids=["moved", "swapped"])
def test_invariant_8_a_key_that_changed_before_a_column_was_filled_keeps_its_value(
    new_lake: NewLake, moves: str
) -> None:
    with new_lake(TABLE + LONG, "t") as source:
        source.pin()
        source.copy()
        source.catch_up()
        source.execute("alter table t add w text default long()")
        source.execute(moves)
        source.catch_up()
        assert source.equal(T)


def test_a_column_that_was_filled_later_than_a_comparison_is_compared_then(
    new_lake: NewLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together, "SMALL_ROWS", -1)
    with new_lake(TABLE, "t") as source:
        source.pin()
        source.copy()
        source.execute("alter table t add w text default random()::text")
        flushed = list[None]()

        def flush() -> None:
            flushed.append(None)
            if len(flushed) == 2:  # the comparison has its point, and the fill is to come
                source.execute("update t set w = 'later' where id = 3")

        assert [one.outcome for one in source.verify(flush)] == ["equal"]


@pytest.mark.parametrize(
    "changes",
    [
        "alter table t add w int not null default 5; insert into t values (100, 'new', 7)",
        "alter table t drop v; insert into t values (100)",
        "alter table t rename v to x; alter table t add y int; insert into t values (100, 'a', 3)",
        "alter table t alter v type text; insert into t values (100, repeat('long', 9))",
    ],
    ids=["add", "drop", "rename", "widen"],
)
def test_a_schema_change_is_followed_once_the_catalog_shows_it(
    new_lake: NewLake, monkeypatch: pytest.MonkeyPatch, changes: str
) -> None:
    """A COMMIT that waits for a standby: the log has the rows, the catalog the columns before."""
    monkeypatch.setattr(reread, "VISIBLE_SECONDS", 0.3)
    with new_lake(TABLE, "t") as source:
        source.pin()
        source.copy()
        source.catch_up()
        dsn = source.pipeline.source_dsn
        hanging = f"begin; {changes}; commit"
        with hanging_commits(dsn, hanging), Pipeline.open(source.config) as pipeline:
            with psycopg.connect(dsn, autocommit=True) as session:
                run(source.config, until=current_lsn(session))
            with pytest.raises(TableProblem, match=r"doesn't show transaction .* SyncRep"):
                drain(pipeline, source.session, T)
        source.catch_up()
        assert [one.outcome for one in source.verify()] == ["equal"]


def test_what_was_read_of_an_asynchronous_commit_survives_a_crash(
    public_directory: Path, postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path
) -> None:
    """The log and the catalog are at another server: no commit of theirs flushes the source."""
    late = {"wal_writer_delay": "10s", "full_page_writes": "off"}
    server = EmbeddedPostgres(public_directory / "careless_later", settings=late)
    dsn, elsewhere = server.start(), {"postgres_url": postgres_dsn()}

    def crash(seen: Lake) -> None:
        os.kill(json.loads((server.directory / "server.json").read_text())["pid"], signal.SIGKILL)
        while not seen.source.closed:
            with suppress(psycopg.OperationalError):
                seen.execute("select 1")
        server.stop()
        server.start()

    try:
        with lake(dsn, spark_server.ensure(), TABLE, "t", state=elsewhere) as source:
            source.pin()
            source.copy()
            source.catch_up()
            source.execute("alter table t add w text default random()::text")
            source.execute("insert into t values (100, 'x', 'y')")
            source.flush()
            source.execute("checkpoint; set synchronous_commit = off")
            source.execute("update t set w = 'read' where id = 3")
            source.drain(T)
            crash(source)
        with psycopg.connect(server.start(), autocommit=True) as again:
            there = Lake(source.config, again)
            try:
                there.catch_up()
                assert there.execute("select w from t where id = 3") == [("read",)]
                assert there.equal(T)
            finally:
                there.close()
    finally:
        server.remove()


def test_what_was_read_waits_for_synchronous_standbys_no_longer_than_it_may(
    new_lake: NewLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reread, "VISIBLE_SECONDS", 0.3)
    with new_lake(TABLE, "t") as source:
        source.pin()
        source.copy()
        source.execute("alter table t add w text default random()::text")
        source.execute("insert into t values (100, 'x', 'y')")
        source.flush()
        nothing = "select pg_logical_emit_message(true, 'nothing', '')"
        dsn = source.pipeline.source_dsn
        with (
            hanging_commits(dsn, nothing),
            Pipeline.open(source.config) as pipeline,
            pytest.raises(TableProblem, match="isn't on the synchronous standbys yet"),
        ):
            drain(pipeline, source.session, T)
        source.catch_up()
        assert source.equal(T)


@pytest.mark.parametrize("columns", [{"exclude": ["v"]}, {"mask": {"v": "redact"}}])
def test_the_flusher_waits_for_the_catalog_where_columns_stay_in_the_source(
    new_lake: NewLake, columns: dict[str, object]
) -> None:
    """Not for ever: the COMMIT that hangs here is let go while the flusher looks."""
    changes = "alter table t add w int; insert into t values (100, 'new', 7)"
    with (
        new_lake(TABLE, {"name": "t", "columns": columns}) as source,
        ThreadPoolExecutor(1) as pool,
    ):
        source.pin()
        source.copy()
        source.catch_up()
        dsn = source.pipeline.source_dsn
        with hanging_commits(dsn, f"begin; {changes}; commit"):
            with psycopg.connect(dsn, autocommit=True) as session:
                flushed = pool.submit(run, source.config, until=current_lsn(session))
            decoding = "application_name like '% decoder'"
            wait_for(
                lambda: source.execute(f"select pid from pg_stat_activity where {decoding}") != []
            )
        flushed.result()
        source.catch_up()
        assert [one.outcome for one in source.verify()] == ["equal"]
