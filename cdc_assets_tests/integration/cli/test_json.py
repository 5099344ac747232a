"""``--json`` of the commands that do something: the result alone on stdout, progress on stderr."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

from cdc_assets.cli.main import cli
from cdc_assets.config.source import load_config
from cdc_assets.flusher.flusher import run
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.postgres.slots import current_lsn
from cdc_assets_tests.conftest import NewDatabase

Command = Callable[..., Any]
FORM = {"table", "copied", "merged", "problem"}
SETUP = """
create table a (id int primary key, v text);
create table b (id int primary key, v text);
insert into a select g, 'x' from generate_series(1, 30) g;
insert into b select g, 'x' from generate_series(1, 20) g;
"""


@pytest.fixture
def dsn(postgres_dsn: NewDatabase) -> str:
    return postgres_dsn()


def configured(file: Path, dsn: str, *tables: str) -> None:
    file.write_text(json.dumps({"name": "s", "postgres": {"dsn": dsn}, "tables": tables}))


def printed(file: Path, *words: str, code: int = 0) -> Any:
    """What the command prints, which is JSON from the first character to the last."""
    done = CliRunner().invoke(cli, ["--config", str(file), *words, "--json"])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


@pytest.mark.spark
def test_what_was_copied_and_merged(
    dsn: str, spark_server: SparkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "s.json"
    configured(file, dsn, "a", "b")
    spark_server.ensure()
    monkeypatch.setenv("CDC_ASSETS_HOME", str(spark_server.home))  # whose Spark server runs

    def done(*words: str, code: int = 0) -> dict[str, Any]:
        found = printed(file, *words, code=code)
        assert [set(one) for one in found] == [FORM] * len(found)
        return {one["table"]: one for one in found}

    with psycopg.connect(dsn, autocommit=True) as source:
        source.execute(SETUP.encode())
        first = done("sync")
        assert {name: one["copied"]["rows"] for name, one in first.items()} == {
            "public.a": 30,
            "public.b": 20,
        }
        source.execute("update a set v = 'y' where id < 4")
        second = done("sync")
        assert (second["public.a"]["copied"], second["public.b"]["merged"]) == (None, None)
        merged = second["public.a"]["merged"]
        assert (merged["changes"], merged["rows"], merged["pending_entries"]) == (3, 30, 0)
        source.execute("delete from b where id < 6")
        run(load_config(file), until=current_lsn(source))
        assert done("materialize", "--table", "b")["public.b"]["merged"]["rows"] == 15
        assert done("resync", "a")["public.a"]["copied"]["rows"] == 30
        assert done("snapshot", "--table", "a")["public.a"]["copied"] is None
        source.execute(
            "update _pg2iceberg.tables set state = 'parked', reason = 'for the test'"
            " where table_name = 'public.b'"
        )
        source.execute("update a set v = 'z' where id = 7")
        failed = done("sync", code=1)
        assert "for the test" in failed["public.b"]["problem"]
        assert failed["public.a"]["merged"]["changes"] == 1
        assert failed["public.a"]["problem"] is None
        configured(file, dsn, "a")
        dropped = printed(file, "drop-table", "b", "--purge")
        assert dropped["table"] == "public.b"
        assert (dropped["publications"], dropped["purged"]) == (["cdc_s"], ["lake.`s`.`b`"])
        assert dropped["files"] > 0 and dropped["bytes"] > 0
        given_up = {"source": "s", "slot": "cdc_s", "publication": "cdc_s"}
        nothing = {"refused": [], "files": 0, "bytes": 0}
        assert printed(file, "drop-source", "--yes", "s") == {**given_up, **nothing}


def test_what_is_paused(dsn: str, tmp_home: Path, tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    configured(file, dsn, "a", "b")
    paused = printed(file, "pause", "a")
    assert (paused["source"], paused["paused_since"]) == ("s", None)
    assert list(paused["tables"]) == ["public.a"]
    assert printed(file, "pause")["paused_since"] > paused["tables"]["public.a"]
    both = printed(file, "resume", "a", "b")
    assert both["resumed"] == ["public.a"]
    assert both["paused_since"] is not None
    nothing: dict[str, Any] = {"source": "s", "paused_since": None, "tables": {}}
    assert printed(file, "resume") == nothing | {"resumed": ["s"]}
    assert printed(file, "resume") == nothing | {"resumed": []}


def test_alerts_that_were_sent(dsn: str, tmp_home: Path, tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    settings = {"name": "s", "postgres": {"dsn": dsn}, "tables": ["a"]}
    file.write_text(json.dumps(settings))
    assert printed(file, "alert-test") == [{"sink": "0:log", "problem": None}]
    away = {"type": "webhook", "url": "http://127.0.0.1:1/none"}
    file.write_text(json.dumps(settings | {"alerts": {"sinks": [away]}}))
    [told] = printed(file, "alert-test", code=1)
    assert told["sink"] == "0:webhook"
    assert told["problem"]


def test_what_goes_on_has_no_result(dsn: str, tmp_home: Path, tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    configured(file, dsn, "a")
    words = ["--config", str(file), "materialize", "--follow", "--json"]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 2
    assert "it goes on, and has no result" in done.stderr
