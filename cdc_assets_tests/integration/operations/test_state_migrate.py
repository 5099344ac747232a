"""``state migrate``: the log of a source goes on in another database, and nowhere else."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

from cdc_assets.cli.main import cli
from cdc_assets.config.source import SourceConfig
from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.errors import ConfigurationError, CoordinationError, NotReady, PreflightError
from cdc_assets.flusher.flusher import run
from cdc_assets.flusher.progress import Progress
from cdc_assets.log.moving.mark import set_mark
from cdc_assets.log.moving.rows import STAYS, moved_tables
from cdc_assets.log.schema.ownership import ownership_findings
from cdc_assets.log.store import LogStore
from cdc_assets.operations.state import migrate as module
from cdc_assets.operations.state.migrate import at_another_place, migrate_state, undo_migration
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.slots import current_lsn
from cdc_assets.readiness.flushing import coordination_findings
from cdc_assets.readiness.foreign_errors import explained
from cdc_assets_tests.conftest import databases, with_database
from cdc_assets_tests.support.flusher import Bench, flushing
from cdc_assets_tests.support.waiting import wait_for

SCHEMA = "_pg2iceberg"
TABLE = "create table t (id int primary key, v text)"


@pytest.fixture
def other(postgres_servers: Callable[[int], EmbeddedPostgres]) -> Iterator[str]:
    """An empty database of another server, and another version of Postgres."""
    with databases(postgres_servers(16)) as new:
        yield new()


@pytest.fixture
def source(source: Bench) -> Bench:
    """With a log of ten changes."""
    source.execute(TABLE)
    source.flush(source.config("public.t"))
    source.execute("insert into t select n, 'a' from generate_series(1, 10) n")
    source.flush(source.config("public.t"))
    return source


def at(source: Bench, dsn: str) -> Bench:
    """The same source by a configuration whose state is there."""
    return replace(source, log_dsn=dsn)


def rows(dsn: str, name: str) -> dict[str, list[tuple[Any, ...]]]:
    """The rows of a source that are taken along."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"set search_path = {SCHEMA}".encode())
        found = {}
        for table in moved_tables(connection, SCHEMA):
            columns = ", ".join(f'"{column}"' for column in table.columns)
            asked = f"select {columns} from {table.name} where source = %s"
            found[table.name] = sorted(connection.execute(asked.encode(), (name,)), key=repr)
    found["pipeline_meta"] = [row for row in found["pipeline_meta"] if "moved" not in row]
    return found


def is_live(config: SourceConfig) -> bool:
    try:
        Pipeline.open(config).close()
    except CoordinationError:
        return False
    return True


def codes(config: SourceConfig) -> set[str]:
    return {finding.code for finding in coordination_findings(config)}


def test_the_log_goes_on_there_and_the_former_place_names_it(source: Bench, other: str) -> None:
    here = source.config("public.t")
    there = at(source, other).config("public.t")
    with Pipeline.open(here) as pipeline:
        pipeline.store.connection.execute(
            "insert into backfills (source, backfill, table_name, requested_by)"
            " overriding system value values (%s, 41, 'public.t', 'me')",
            (source.name,),
        )
    before = rows(source.dsn, source.name)
    done = migrate_state(here, other)
    assert done.outcome == "moved"
    assert rows(other, source.name) == before
    assert done.rows["log_index"] == len(before["log_index"]) > 0
    assert not any(rows(source.dsn, source.name).values())

    assert not is_live(here)
    with pytest.raises(NotReady, match=r"was moved to .*Set state\.postgres_url"):
        run(here)
    assert codes(here) == {"state_moved"}
    assert codes(there) == set()
    for dsn in (source.dsn, other):
        with psycopg.connect(dsn) as connection:
            assert list(ownership_findings(connection, SCHEMA)) == []

    source.execute("insert into t select n, 'b' from generate_series(11, 20) n")
    moved = at(source, other)
    moved.flush(there)
    assert sorted(map(int, moved.ids())) == list(range(1, 21))  # type: ignore[arg-type]
    numbered = "insert into {}.backfills (source, table_name, requested_by) values ('x', 't', 'me')"
    with psycopg.connect(other) as connection:
        found = connection.execute(f"{numbered.format(SCHEMA)} returning backfill".encode())
        assert found.fetchone() == (42,)
    assert migrate_state(here, other).outcome == "was moved"
    with pytest.raises(CoordinationError, match="was moved to"):
        undo_migration(here)


def test_it_comes_back(source: Bench, other: str) -> None:
    here, there = source.config("public.t"), at(source, other).config("public.t")
    before = rows(source.dsn, source.name)
    migrate_state(here, other)
    migrate_state(there, source.dsn)
    assert rows(source.dsn, source.name) == before
    assert not is_live(there)
    source.execute("insert into t values (11, 'b')")
    source.flush(here)
    assert len(source.ids()) == 11
    assert migrate_state(here, other).outcome == "moved"


@pytest.mark.parametrize("undoes", [False, True])
def test_rows_of_a_move_that_was_given_up_never_live(
    source: Bench,
    postgres_servers: Callable[[int], EmbeddedPostgres],
    monkeypatch: pytest.MonkeyPatch,
    undoes: bool,
) -> None:
    """The log went elsewhere then: two would live, one of them old."""
    here = source.config("public.t")
    with databases(postgres_servers(16)) as new:
        given_up, other = (at(source, new()) for _ in range(2))
        with monkeypatch.context() as patched:
            patched.setattr(module, "_leave", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                migrate_state(here, str(given_up.log_dsn))
        if undoes:
            undo_migration(here)
        migrate_state(here, str(other.log_dsn))
        with pytest.raises(CoordinationError, match=r"was moved to"):
            migrate_state(here, str(given_up.log_dsn))
        assert not is_live(given_up.config("public.t"))
        assert is_live(other.config("public.t"))


def test_every_table_is_taken_along_or_stays_on_purpose(source: Bench) -> None:
    """A migration that adds a table has to say to which of the two kinds it belongs."""
    with psycopg.connect(source.dsn) as connection:
        moved = {table.name for table in moved_tables(connection, SCHEMA)}
        there = connection.execute(
            "select relname from pg_class where relkind = 'r' and relnamespace = %s::regnamespace",
            (SCHEMA,),
        )
        assert {str(name) for (name,) in there} - moved - STAYS == {"schema_version", "pin_holders"}


def test_other_sources_of_the_schema_go_on(source: Bench, other: str) -> None:
    """Meanwhile, and with all of their rows."""
    neighbour = replace(source, name="neighbour")
    source.execute("create table n (id int primary key)")
    beside = neighbour.config("public.n")
    neighbour.flush(beside)
    stop = threading.Event()

    def write() -> None:
        with psycopg.connect(source.dsn, autocommit=True) as client:
            number = 0
            while not stop.wait(0.005):
                client.execute("insert into n values (%s)", ((number := number + 1),))

    writer = threading.Thread(target=write)
    try:
        with flushing(beside) as progress:
            writer.start()
            migrate_state(source.config("public.t"), other)
            migrate_state(at(source, other).config("public.t"), source.dsn)
            stop.set()
            writer.join()
            with Pipeline.open(beside) as pipeline:
                assert pipeline.store.await_flushed(current_lsn(source.connection), 30)
            assert progress.sessions == 1
        kept = [int(found or 0) for found in neighbour.ids("public.n")]
        assert kept == [number for (number,) in source.execute("select id from n order by id")]
        assert len(kept) > 10
    finally:
        stop.set()
        neighbour.drop_slot()


def test_sessions_that_were_there_can_write_nothing_more(source: Bench, other: str) -> None:
    here = source.config("public.t")
    with (
        Pipeline.open(here) as pipeline,
        psycopg.connect(source.dsn, autocommit=True, application_name="nobody knows") as unknown,
    ):
        migrate_state(here, other)
        with pytest.raises(psycopg.OperationalError):
            pipeline.store.advance(current_lsn(source.connection))
        with pytest.raises(psycopg.errors.CheckViolation, match="moved_") as caught:
            unknown.execute(
                f"insert into {SCHEMA}.flushed_lsn (source, lsn) values (%s, '0/1')".encode(),
                (source.name,),
            )
        problem = explained(caught.value, here)
        assert isinstance(problem, CoordinationError)
        assert "was moved" in problem.what
        unknown.execute(f"insert into {SCHEMA}.flushed_lsn values ('another', '0/1')".encode())


def test_a_flusher_in_line_ends_with_the_reason(
    source: Bench, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, ends, progress = source.config("public.t"), list[BaseException](), Progress()

    def wait_in_line() -> None:
        try:
            run(here, progress=progress)
        except CoordinationError as error:
            ends.append(error)

    waiting = threading.Thread(target=wait_in_line)

    def late(*given: Any) -> None:
        if not waiting.ident:
            waiting.start()
            wait_for(lambda: progress.waits, 30)
        set_mark(*given)

    monkeypatch.setattr(module, "set_mark", late)
    migrate_state(here, other)
    waiting.join(60)
    assert not waiting.is_alive()
    assert "the state of source" in str(ends)


def test_it_is_refused_while_anything_works(
    source: Bench, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.5)
    here = source.config("public.t")
    with flushing(here):
        wait_for(lambda: source.execute("select 1 from pg_replication_slots where active"), 30)
        with pytest.raises(PreflightError, match=r"a flusher of source .* is active"):
            migrate_state(here, other)
    with (
        Pipeline.open(here) as pipeline,
        pipeline.store.locked("run:4711"),
        pytest.raises(PreflightError, match=r"works with source .*: run:4711"),
    ):
        migrate_state(here, other)
    assert is_live(here)
    assert migrate_state(here, other).outcome == "moved"


def test_it_is_refused_with_the_reason_and_all_is_as_it_was(
    source: Bench, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, before = source.config("public.t"), rows(source.dsn, source.name)
    with pytest.raises(ConfigurationError, match="is where the state"):
        migrate_state(here, source.dsn)
    with pytest.raises(ConfigurationError, match="no address"):
        migrate_state(here, " ")  # "$UNSET"
    with pytest.raises(ConfigurationError, match="environment variable NOWHERE is not set"):
        migrate_state(here, "${NOWHERE}")
    with pytest.raises(PreflightError, match="can't be reached"):
        migrate_state(here, "postgresql://x:hush@127.0.0.1:1/none")
    with closing(LogStore.open(other, source.name, SCHEMA)) as there:
        there.set_meta("key_salt", "somebody's")
    with pytest.raises(PreflightError, match="already at"):
        migrate_state(here, other)
    source.execute(f"update {SCHEMA}.tables set state = 'copying', pin = gen_random_uuid()")
    source.execute(
        f"insert into {SCHEMA}.pins (pin, source, consistent_point) select pin, source, '0/1'"
        f" from {SCHEMA}.tables"
    )
    with closing(LogStore.open(other, source.name, SCHEMA)) as there:
        there.forget_meta("key_salt")
    with pytest.raises(PreflightError, match=r"copied under a snapshot: public\.t"):
        migrate_state(here, other)
    with monkeypatch.context() as patched:
        patched.setattr(module, "SKEW_SECONDS", -1.0)
        with pytest.raises(PreflightError, match="clocks"):
            migrate_state(here, other)
    assert is_live(here)
    assert rows(source.dsn, source.name)["log_index"] == before["log_index"]
    assert undo_migration(here).outcome == "nothing to undo"
    assert migrate_state(here, other, during_copies=True).outcome == "moved"


def test_where_the_rows_do_not_go_the_source_goes_on(source: Bench, other: str) -> None:
    with psycopg.connect(other, autocommit=True) as server:
        server.execute("create database plain encoding 'LATIN1' locale 'C' template template0")
    try:
        here = source.config("public.t")
        with Pipeline.open(here) as pipeline:
            pipeline.store.set_meta("a", "ж")
        before = rows(source.dsn, source.name)
        with pytest.raises(psycopg.errors.UntranslatableCharacter):
            migrate_state(here, with_database(other, "plain"))
        assert is_live(here)
        assert rows(source.dsn, source.name) == before
        source.execute("insert into t values (11, 'b')")
        source.flush(here)
        assert len(source.ids()) == 11
        assert migrate_state(here, other).outcome == "moved"
    finally:
        with psycopg.connect(other, autocommit=True) as server:
            server.execute("drop database plain")


def test_a_session_of_another_role_is_named(source: Bench, other: str) -> None:
    """Whoever may not end it leaves everything as it was."""
    source.execute("create role plain_mover login password 'x'")
    try:
        source.execute(f"alter schema {SCHEMA} owner to plain_mover")
        for (name,) in source.execute(
            "select relname from pg_class where relkind = 'r' and relnamespace = %s::regnamespace",
            SCHEMA,
        ):
            source.execute(f"alter table {SCHEMA}.{name} owner to plain_mover")
        plain = psycopg.conninfo.make_conninfo(source.dsn, user="plain_mover", password="x")
        here = at(source, plain).config("public.t")
        with psycopg.connect(source.dsn, application_name=f"cdc_assets {source.name} x"):
            with pytest.raises(CoordinationError, match="are still in the coordination database"):
                migrate_state(at(source, plain).config("public.t"), other)
            assert is_live(here)
        assert migrate_state(at(source, plain).config("public.t"), other).outcome == "moved"
    finally:
        source.execute("drop owned by plain_mover cascade")
        source.execute("drop role plain_mover")


def test_the_command_says_what_it_did(
    source: Bench, other: str, monkeypatch: pytest.MonkeyPatch, tmp_home: Path
) -> None:
    file = str(source.config_file("public.t"))
    secret = psycopg.conninfo.conninfo_to_dict(other)["password"]
    monkeypatch.setenv("STATE_DSN", other)
    ask = CliRunner().invoke

    def told(*words: str) -> Any:
        found = ask(cli, ["--config", file, *words])
        assert str(secret) not in found.output
        return found

    assert told("state", "migrate").exit_code == 2
    undone = told("state", "migrate", "--undo", "--json")
    assert (undone.exit_code, json.loads(undone.stdout)["outcome"]) == (0, "nothing to undo")
    moved = told("state", "migrate", "--to", "${STATE_DSN}", "--json")
    assert moved.exit_code == 0, moved.output
    place = json.loads(moved.stdout)["place"]
    assert json.loads(moved.stdout)["rows"]["tables"] == 1
    for forgot in (["status"], ["status", "--json"], ["flush", "--until", "current"], ["pause"]):
        found = told(*forgot)
        assert found.exit_code == 1
        assert f"was moved to {place}" in " ".join(found.stderr.split())
    checked = told("check", "--json")
    assert "state_moved" in {finding["code"] for finding in json.loads(checked.stdout)}
    assert checked.exit_code == 1


def test_another_address_is_in_no_error(source: Bench) -> None:
    with pytest.raises(ConfigurationError) as caught:
        at_another_place(source.config("public.t"), "postgresql://u:hu@sh@h:1/x")
    assert "hu@sh" not in str(caught.value)
