"""What a person does to a source, by jobs and by commands: resync, pause, resume, verify, drop."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import url2pathname

import dagster as dg
import pytest
from click.testing import CliRunner

from cdc_assets.cli.main import cli
from cdc_assets.config.source import SourceConfig
from cdc_assets.dagster.build import build_defs
from cdc_assets.dagster.sensors import sessions
from cdc_assets.errors import SourceMismatch, TablePaused
from cdc_assets.flusher.flusher import run as flush
from cdc_assets.observe.status import collect
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.slots import current_lsn
from cdc_assets_tests.support.lake import Lake, NewLake, copied
from cdc_assets_tests.support.waiting import wait_for

pytestmark = pytest.mark.spark

A, B = TableId("public", "a"), TableId("public", "b")
SETUP = """
create table a (id int primary key, v text);
create table b (id int primary key, v text);
insert into a select i, 'copied' from generate_series(1, 20) i;
insert into b select i, 'copied' from generate_series(1, 20) i;
"""


class Ui:
    """Launches jobs as a person does in the launchpad, in this process."""

    def __init__(self, config: SourceConfig, instance: dg.DagsterInstance) -> None:
        self.defs = build_defs(config)
        self.instance = instance

    def launch(self, verb: str, **config: Any) -> dg.ExecuteInProcessResult:
        return self.defs.resolve_job_def(f"{verb}_src").execute_in_process(
            {"ops": {verb: {"config": config}}}, instance=self.instance, raise_on_error=False
        )

    def said(self, result: dg.ExecuteInProcessResult) -> dict[str, Any]:
        """The metadata of the operation's output."""
        assert result.success
        [event] = [e for e in result.all_events if e.is_successful_output]
        return {k: v.value for k, v in event.step_output_data.metadata.items()}

    def why(self, result: dg.ExecuteInProcessResult) -> str:
        assert not result.success
        [event] = [e for e in result.all_events if e.is_step_failure]
        error = event.step_failure_data.error
        assert error is not None
        return error.to_string()


@pytest.fixture
def source(copied_lake: NewLake) -> Iterator[Lake]:
    with copied_lake(SETUP, "a", "b") as opened:
        opened.flush()
        yield opened
        sessions.close_all()


@pytest.fixture
def ui(source: Lake) -> Iterator[Ui]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield Ui(source.config.model_copy(update={"materializer": "run"}), instance)


def _states(source: Lake) -> dict[str, tuple[str, int]]:
    return {str(row.table): (row.state, row.epoch) for row in source.pipeline.store.tables()}


def _command(source: Lake, path: Path, *arguments: str) -> tuple[int, str]:
    file = path / "src.json"
    file.write_text(source.config.dump())
    done = CliRunner().invoke(cli, ["--config", str(file), *arguments])
    return done.exit_code, done.output


def test_resync_copies_one_table_anew(source: Lake, ui: Ui) -> None:
    assert "name the tables" in ui.why(ui.launch("resync", tables=[]))
    assert "is not in the configuration" in ui.why(ui.launch("resync", tables=["nobody"]))
    assert ui.said(ui.launch("resync", tables=["a"])) == {"copied anew": "public.a"}
    assert _states(source) == {"public.a": ("waiting", 2), "public.b": ("streaming", 1)}


def test_a_paused_table_keeps_its_rows_until_it_is_resumed(
    source: Lake, ui: Ui, tmp_path: Path
) -> None:
    assert ui.said(ui.launch("pause", tables=["a"]))["paused now"].startswith("public.a since 2")
    for table in (A, B):
        source.execute(f"update {table} set v = 'changed'")
    source.flush()
    source.drain(B)
    with pytest.raises(TablePaused, match="cdc-assets resume"):
        source.drain(A)
    assert {row[1] for row in source.rows(A)} == {"copied"}
    assert {row[1] for row in source.rows(B)} == {"changed"}
    status = {table.name: table for table in collect(source.pipeline).tables}
    assert status["public.a"].pending_rows == 20
    assert status["public.a"].paused_since is not None
    assert status["public.b"].paused_since is None

    # The source's pause is another one: its end doesn't end the table's.
    assert "public.b" in ui.said(ui.launch("pause"))["paused now"]
    code, said = _command(source, tmp_path, "resume")
    assert code == 0
    assert [line.rpartition(" since")[0] or line for line in said.splitlines()] == [
        f"source {source.config.name}: resumed",
        "public.a: paused",
    ]
    code, said = _command(source, tmp_path, "materialize")
    assert (code, "public.a: it is paused since" in said) == (1, True)

    assert ui.said(ui.launch("resume", tables=["a"])) == {"paused now": "nothing"}
    source.drain(A)
    assert {row[1] for row in source.rows(A)} == {"changed"}


def test_the_sensor_asks_for_nothing_that_is_paused(source: Lake, ui: Ui) -> None:
    for table in (A, B):  # the paused one is the oldest
        source.execute(f"update {table} set v = 'changed'")
        source.flush()
    repository = ui.defs.get_repository_def()

    def tick() -> tuple[int, str]:
        with dg.build_sensor_context(ui.instance, repository_def=repository) as context:
            found = repository.get_sensor_def("materializer_src").evaluate_tick(context)
        return len(found.run_requests or ()), found.skip_message or ""

    assert tick()[0] == 1
    ui.launch("pause")
    assert tick() == (0, "All 2 copied tables are paused; 40 changes wait.")
    ui.launch("pause", tables=["a"])
    ui.launch("resume")
    assert tick()[0] == 1
    job = ui.defs.resolve_job_def("materialize_src_tables")
    assert job.execute_in_process(instance=ui.instance).success, "a pause is no failure"
    assert {row[1] for row in source.rows(A)} == {"copied"}
    assert {row[1] for row in source.rows(B)} == {"changed"}, "it held up the others"


def test_verify_says_what_differs(source: Lake, ui: Ui) -> None:
    source.execute("update a set v = 'changed' where id = 3")
    said = ui.said(ui.launch("verify"))["comparison"]
    assert [line.split("|")[1:5] for line in said.splitlines()[2:]] == [
        [" public.a ", " 20 ", " 20 ", " equal "],
        [" public.b ", " 20 ", " 20 ", " equal "],
    ]
    source.session.sql("update lake.src.b set v = 'wrong' where id = 7")
    result = ui.launch("verify", tables=["b"])
    assert re.search(
        r"public\.b: 1 key differs: #[0-9a-f]{12} \(source 1, lake 1: v\)", ui.why(result)
    )
    said = ui.said(ui.launch("verify", tables=["b"], repair=True))["comparison"]
    assert said.splitlines()[-1].endswith("| 1 key was corrected |")


def test_a_dropped_source_leaves_its_tables_and_nothing_else(
    source: Lake, ui: Ui, tmp_path: Path
) -> None:
    stop = threading.Event()
    problems: list[BaseException] = []

    def stream() -> None:
        try:
            flush(source.config, stop=stop)
        except SourceMismatch as error:
            problems.append(error)

    flusher = threading.Thread(target=stream)
    flusher.start()
    try:
        wait_for(lambda: source.execute("select 1 from pg_replication_slots where active"), 60)
        source.execute("update b set v = 'staged'")
        wait_for(lambda: source.pipeline.store.log_end(B) > 0, 60)
        assert "Type source: src" in ui.why(ui.launch("drop", source="shop"))
        assert source.execute("select 1 from pg_replication_slots where slot_name = 'cdc_src'")
        said = ui.said(ui.launch("drop", source="src"))
        nothing = {"left to its owner": "nothing", "files": 0, "bytes": 0}
        assert said == {"slot": "cdc_src", "publication": "cdc_src", **nothing}
        flusher.join(60)
    finally:
        stop.set()
        flusher.join(60)
    assert [str(problem).split(" at ")[0] for problem in problems] == ["source src was dropped"]
    assert not source.execute("select 1 from pg_replication_slots where slot_name = 'cdc_src'")
    assert not source.execute("select 1 from pg_publication")
    assert len(source.rows(A)) == 20
    assert collect(source.pipeline).flusher.state == "dropped"

    # Nothing makes it again by itself; doing it twice is no error.
    with pytest.raises(SourceMismatch, match="resume"):
        source.pins.tick()
    with pytest.raises(SourceMismatch, match="resume"):
        flush(source.config, until=current_lsn(source.source))
    code, said_ = _command(source, tmp_path, "drop-source", "--yes", "src")
    assert (code, said_) == (
        0,
        "slot cdc_src: there was none\npublication cdc_src: there was none\n",
    )
    assert _command(source, tmp_path, "drop-source")[0] == 2

    staging = Path(url2pathname(urlparse(source.config.staging_uri).path)) / "src"
    stranger = staging / "notes.txt"
    stranger.write_text("not ours")
    count = len([*staging.rglob("*.parquet")])
    assert count > 0
    code, said_ = _command(source, tmp_path, "drop-source", "--yes", "src", "--files")
    assert (code, f"staged files: {count + 1} removed" in said_) == (0, True)  # and .writable
    assert [*staging.rglob("*")] == [stranger], "what isn't ours stays"
    stranger.unlink()

    # Taken up again, everything is copied anew, and what changed meanwhile is there.
    source.execute("delete from a where id > 5")
    code, said_ = _command(source, tmp_path, "resume")
    assert (code, "copied anew" in said_) == (0, True)
    source.pins.close()
    with copied(
        source.config.postgres.dsn.get_secret_value() if source.config.postgres.dsn else "",
        source.config.spark.remote or "",
        "select 1",
        "a",
        "b",
    ) as again:
        again.catch_up()
        assert len(again.rows(A)) == 5
        assert [one.equal for one in again.verify()] == [True, True]
