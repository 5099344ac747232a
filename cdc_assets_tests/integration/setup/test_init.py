"""``cdc-assets init`` and ``tables``: what they write is enough, for the roles that they name."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml
from click.testing import Result
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cdc_assets.config.source import load_config, parse_config
from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.flusher.flusher import run
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.slots import current_lsn
from cdc_assets_tests.support.prepared import FREE, paste, ran

pytestmark = pytest.mark.timeout(300)
Init = Callable[..., Result]


def test_roles_of_their_own_are_all_that_is_needed(
    admin: str, postgres: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From an administrator's address to a flusher that streams, by what was printed alone."""
    result = ran("init", "app", "--yes")
    text = Path("app.yaml").read_text()
    assert yaml.safe_load(text)["tables"] == FREE
    assert str(conninfo_to_dict(admin)["password"]) not in result.output + text
    script = Path("app.sql").read_text()
    for wrong in ("keyless", "quick", "parent", "drop"):
        assert wrong not in script
    paste(postgres, admin, script)
    exported = dict(re.findall(r"export (\w+)=(\S+)", result.stdout))
    for name, role in (("APP_DSN", "cdc_app"), ("APP_STREAM_DSN", "cdc_app_stream")):
        address = exported[name].strip("'")
        assert f"{role}:…@" in address
        monkeypatch.setenv(name, address.replace("…", "pw"))
    found = json.loads(ran("--config", "app.yaml", "check", "--json").stdout)
    assert [f["code"] for f in found if f["severity"] == "error"] == []
    assert "excess_rights" not in {f["code"] for f in found}
    config = load_config("app.yaml")
    with psycopg.connect(admin, autocommit=True) as source:
        run(config, until=current_lsn(source))
        source.execute("update orders set v = 'y' where id <= 10; delete from orders where id = 11")
        run(config, until=current_lsn(source))
    with Pipeline.open(config) as pipeline:
        rows = {str(row.table): row for row in pipeline.store.tables()}
    assert sorted(rows) == sorted(FREE)


def test_a_superuser_may_do_it_all(admin: str) -> None:
    result = ran("init", "app", "--yes", "--same-role", "--table", "orders")
    written = yaml.safe_load(Path("app.yaml").read_text())
    assert written["postgres"] == {"dsn": "${APP_DSN}"}
    assert written["tables"] == ["public.orders"]
    if "next:" in result.stdout:  # the server's settings are for an administrator
        assert "role" not in Path("app.sql").read_text()
    else:
        assert "server_version" in result.stderr  # what check says


@pytest.mark.parametrize(
    ("arguments", "said", "code"),
    [
        (["app", "--table", "quick"], "\npublic.quick: it is unlogged", 2),
        (["app", "--table", "nothing"], "has no table nothing", 2),
        (["app", "--exclude", "*.*"], "no table is left", 2),
        (["App"], "write up to 40 lower-case letters", 2),
        (["other"], "export OTHER_DSN", 2),
        ([], "export NAME_DSN", 2),
        (["x", "--address", "postgresql://a:hush@127.0.0.1:1/none"], "can't be reached", 1),
        (["x", "--address", "postgresql://a:hush@h@h/none"], "not an address that libpq reads", 2),
        (["app", "--output", "/dev/null/app.yaml"], "can't be written", 2),
        (["app", "--output", "app.sql"], "ends in .yaml", 2),
        (["app", "--exclude", "quikc"], "has no table quikc", 2),
    ],
)
def test_what_cannot_be_done_is_said(
    admin: str, arguments: list[str], said: str, code: int
) -> None:
    result = ran("init", "--yes", *arguments, code=code)
    assert said in result.output
    assert "hush" not in result.output
    assert list(Path().glob("*.yaml")) == list(Path().glob("*.sql")) == []


def test_a_second_source_has_a_log_of_its_own(admin: str, postgres: EmbeddedPostgres) -> None:
    with psycopg.connect(admin, autocommit=True) as source:
        source.execute("create schema _pg2iceberg")  # somebody else's
    ran("init", "app", "--yes")
    assert yaml.safe_load(Path("app.yaml").read_text())["state"] == {"schema": "_pg2iceberg_app"}
    script = Path("app.sql").read_text()
    assert "create schema if not exists _pg2iceberg_app authorization cdc_app;" in script
    paste(postgres, admin, script)


def test_what_is_exported_already_is_not_taken_for_another_address(
    admin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APP_DSN", "postgresql://somebody@elsewhere/else")
    said = ran("init", "app", "--yes", "--address", admin).stdout
    assert "psql ADMIN_ADDRESS" in said
    assert "elsewhere" not in said


def test_a_role_that_may_make_no_roles_is_not_offered_as_an_administrator(
    admin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 'psql "$APP_DSN" -f app.sql' in ran("init", "app", "--yes").stdout
    with psycopg.connect(admin, autocommit=True) as source:
        source.execute("create role plain login password 'plain'")
        source.execute("grant all on orders to plain")
        try:
            address = make_conninfo(admin, user="plain", password="plain")
            monkeypatch.setenv("OTHER_DSN", address)
            result = ran("init", "other")
        finally:
            source.execute("drop owned by plain; drop role plain")
    assert "psql ADMIN_ADDRESS -f other.sql" in result.stdout
    assert "it goes on as with --yes" in result.stderr
    restarts = "alter system set wal_level" in Path("other.sql").read_text()
    assert ("restart the server" in result.stdout) == restarts


def test_tables_that_would_be_one_in_the_lake_are_given_names_there(
    admin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APP_STREAM_DSN", admin)
    with psycopg.connect(admin, autocommit=True) as source:
        source.execute('create schema b; create schema "B"')
        for name in ('"Order Lines"', '"order lines"', '"public_order lines_2"'):
            source.execute(f"create table {name} (id int primary key)".encode())
        source.execute('create table b.t (id int primary key); create table "B"."T" (id int)')
    ran("init", "app", "--yes", "--table", "public.*rder*", "--table", "b.*", "--table", '"B".*')
    config = load_config("app.yaml")
    names = {str(table.id): config.lake_name(table.id) for table in config.tables}
    assert names['public."Order Lines"'] == "public_Order Lines"
    assert names['public."order lines"'] == "public_order lines_3"
    assert len({name.lower() for name in names.values()}) == len(names)
    written = yaml.safe_load(Path("app.yaml").read_text())
    for entry in written["tables"]:  # whichever others are taken out
        alone = parse_config({**written, "tables": [entry]}, "alone")
        [table] = alone.tables
        assert alone.lake_name(table.id) == names[str(table.id)]


def test_a_file_that_is_there_is_not_written_over(admin: str) -> None:
    Path("app.sql").write_text("mine")
    assert "app.sql is there already" in ran("init", "app", "--yes", code=2).output
    assert not Path("app.yaml").exists()
    assert Path("app.sql").read_text() == "mine"


def test_in_a_dagster_project_it_is_a_component(admin: str) -> None:
    Path("pyproject.toml").write_text('[tool.dg.project]\nroot_module = "mine"\n')
    Path("src/mine/defs").mkdir(parents=True)
    ran("init", "app", "--yes", "--table", "sales.*")
    written = yaml.safe_load(Path("src/mine/defs/app/defs.yaml").read_text())
    assert written["type"] == "cdc_assets.PostgresSource"
    assert written["attributes"]["tables"] == ["sales.parts"]
    assert Path("src/mine/defs/app/prepare.sql").exists()
    assert "Here are: src/mine/defs/app/defs.yaml" in ran("check", code=2).output


def test_it_asks_for_what_it_was_not_told(
    admin: str, postgres: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a terminal: the address isn't shown; a source is called as its database."""
    name = str(conninfo_to_dict(admin)["dbname"])
    monkeypatch.delenv("APP_DSN")
    leader, follower = pty.openpty()
    started = subprocess.Popen(
        [sys.executable, "-m", "cdc_assets", "init"],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
    )
    os.close(follower)
    seen = ""

    def answer(question: str, text: str) -> None:
        nonlocal seen
        deadline = time.monotonic() + 60
        while question not in seen:
            assert time.monotonic() < deadline, seen
            if select.select([leader], [], [], 1)[0]:
                seen += os.read(leader, 65536).decode()
        seen = ""
        os.write(leader, f"{text}\n".encode())

    try:
        answer("not shown", admin)
        answer("Tables, by names or patterns", "orders, sales.typo")
        answer("Tables, by names or patterns", "orders, sales.*")
        answer("Make roles that only read", "n")
        assert started.wait(60) is not None
        whole = seen
        while select.select([leader], [], [], 0.2)[0]:
            try:
                whole += os.read(leader, 65536).decode()
            except OSError:  # the other end is closed
                break
    finally:
        started.kill()
        started.wait()
        os.close(leader)
    written = yaml.safe_load(Path(f"{name}.yaml").read_text())
    assert written["tables"] == ["public.orders", "sales.parts"]
    assert str(conninfo_to_dict(admin)["password"]) not in whole


def test_tables_lists_them_with_what_is_in_the_way(
    admin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"name": "app", "postgres": {"dsn": "${APP_DSN}"}, "tables": ["orders"]}
    Path("cdc_assets.yaml").write_text(json.dumps(config))
    found: dict[str, dict[str, Any]] = {
        row["table"]: row for row in json.loads(ran("tables", "--json").stdout)
    }
    assert {name for name, row in found.items() if row["configured"]} == {"public.orders"}
    assert (found["public.orders"]["rows"], found["public.orders"]["key"]) == (1000, ["id"])
    assert found["public.orders"]["bytes"] > 8192
    assert found["sales.parts"]["partitions"] == 1
    codes = {n: [f["code"] for f in row["obstacles"]] for n, row in found.items()}
    assert codes == {
        **{name: [] for name in FREE},
        "public.keyless": ["replica_identity"],
        "public.parent": ["table_inherited"],
        "public.quick": ["table_unlogged"],
    }
    assert "table_unlogged: public.quick" in ran("tables").stderr
    with psycopg.connect(admin) as somebody:  # a lock is no reason to wait
        somebody.execute("lock table orders in access exclusive mode")
        began = time.monotonic()
        listed = json.loads(ran("tables", "--json").stdout)
        assert time.monotonic() - began < 5
        assert [row["bytes"] for row in listed if row["table"] == "public.orders"] == [40960]
    unread = make_conninfo(admin, user="cdc_reader", password="pw")
    with psycopg.connect(admin, autocommit=True) as source:
        source.execute("create role cdc_reader login password 'pw'")
        try:
            monkeypatch.setenv("APP_DSN", unread)
            rows = json.loads(ran("tables", "--json").stdout)
            assert all("select_privilege" in [f["code"] for f in r["obstacles"]] for r in rows)
        finally:
            source.execute("drop role cdc_reader")


def test_the_file_may_be_named_by_the_environment(
    admin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "cdc-assets init makes one" in ran("check", code=2).output
    monkeypatch.setenv("CDC_ASSETS_CONFIG", "elsewhere.yaml")
    assert "can't read the configuration elsewhere.yaml" in ran("check", code=2).output
