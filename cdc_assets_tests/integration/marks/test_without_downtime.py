"""The page "Upgrade or re-partition without downtime", command by command, under traffic."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest
import yaml
from pyiceberg.table import Table

import cdc_assets
from cdc_assets.config.source import SourceConfig, load_config
from cdc_assets.lake.catalog.catalog import open_catalog
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.lake.spark.session import open_session
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.support.threads import beside
from cdc_assets_tests.support.waiting import wait_for

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1_800)]

REPOSITORY = Path(cdc_assets.__file__).parents[1]
SETUP = """
create table orders (id int primary key, customer int, total numeric(10, 2), at timestamptz);
insert into orders select i, i % 50, i, now() from generate_series(1, 2000) i;
create table customers (id int primary key, name text);
insert into customers select i, 'c' || i from generate_series(1, 50) i;
"""


class Page:
    """What the page says: its files, its SQL and its commands, in a shell."""

    def __init__(self, folder: Path, dsn: str, spark: str) -> None:
        self.folder, self.dsn = folder, dsn
        text = (REPOSITORY / "docs/operate/without-downtime.md").read_text(encoding="utf-8")
        [self.sql] = re.findall(r"```sql\n(.*?)```", text, re.DOTALL)
        for name, content in re.findall(r'```yaml title="(.*?)"\n(.*?)```', text, re.DOTALL):
            settings = {**yaml.safe_load(content), "spark": {"remote": spark}}
            (folder / name).write_text(yaml.safe_dump(settings))
        blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
        self.blocks = [
            [line.partition("  #")[0].strip() for line in block.splitlines()] for block in blocks
        ]
        self.environment = {
            **os.environ,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": str(REPOSITORY),
            "SHOP_DSN": dsn,
        }

    def run(self, line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", line],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def does(self, line: str) -> str:
        done = self.run(line)
        assert done.returncode == 0, f"{line}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def start(self, stack: ExitStack, line: str) -> None:
        """What goes on for ever, until the test has ended."""
        log = stack.enter_context((self.folder / "processes.log").open("ab"))
        child = subprocess.Popen(
            ["bash", "-c", f"exec {line}"],
            cwd=self.folder,
            env=self.environment,
            stdout=log,
            stderr=log,
        )
        stack.callback(child.wait, 60)
        stack.callback(child.terminate)


@pytest.fixture
def page(
    postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path, tmp_path: Path
) -> Page:
    dsn = postgres_dsn()
    with psycopg.connect(dsn, autocommit=True) as source:
        source.execute(SETUP.encode())
    return Page(tmp_path, dsn, spark_server.ensure())


def traffic(dsn: str, done: list[int]) -> Callable[[threading.Event], None]:
    """Writes all the time; ``done``: the last write."""

    def work(stop: threading.Event) -> None:
        with psycopg.connect(dsn, autocommit=True) as source:
            number = 0
            while not stop.wait(0.01):
                number += 1
                source.execute(
                    "with u as (update orders set total = total + 1, at = now()"
                    " where id %% 100 = %(n)s %% 100) insert into customers values"
                    " (1000 + %(n)s, 'new') on conflict do nothing",
                    {"n": number},
                )
                source.execute("delete from customers where id = 1000 + %s - 20", (number,))
                done[:] = [number]

    return work


def orders(config: SourceConfig) -> Table:
    return open_catalog(config).load_table(("shop_green", "orders"))


def at(config: SourceConfig, name: str) -> int:
    """The snapshot of a branch or a tag of green's table."""
    snapshot = orders(config).snapshot_by_name(name)
    assert snapshot is not None
    return snapshot.snapshot_id


def test_the_page_leads_from_blue_to_green(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_DSN", page.dsn)
    begin, compare, end = page.blocks
    check, snapshot, *on = begin
    mark, marks, diff = compare
    drop_blue, drop_mark = end
    with ExitStack() as stack:
        stack.enter_context(beside(traffic(page.dsn, written := [0])))
        with psycopg.connect(page.dsn, autocommit=True) as source:
            source.execute(page.sql.encode())
        page.does("cdc-assets --config blue.yaml snapshot")
        for line in on:
            page.start(stack, line.replace("green", "blue"))
        missing = page.run(diff)
        assert (missing.returncode, "blue (shop) has no mark" in missing.stderr) == (2, True)
        page.does(check)
        page.does(snapshot)
        for line in on:
            page.start(stack, line)

        [before] = written
        page.does(mark)
        wait_for(lambda: "2 tagged" in page.does(marks), 120)
        said = page.does(diff)
        assert written[0] > before, "nothing was written meanwhile"
        assert re.fullmatch(
            r"public\.customers: equal, \d+ rows\npublic\.orders: equal, 2,000 rows\n", said
        ), said

        green = load_config(page.folder / "green.yaml")
        session = open_session(green)
        stack.callback(session.stop)
        name = "lake.shop_green.orders"
        tagged = session.sql(f"select total from {name} version as of 'mark_switch' where id = 77")
        [(total,)] = tagged.collect()
        assert [field.name for field in orders(green).spec().fields] == ["id_bucket"]
        session.sql(
            f"alter table {name} create branch odd as of version {at(green, 'mark_switch')}"
        )
        session.sql(f"update {name}.branch_odd set total = total + 1 where id = 77")
        odd = f"create or replace tag mark_switch as of version {at(green, 'odd')}"
        session.sql(f"alter table {name} {odd}")
        session.sql(f"alter table {name} drop branch odd")
        done = page.run(f"{diff} --show-keys")
        assert done.returncode == 1, done.stderr
        assert re.search(
            r"public\.orders: different: 1 key differs .*\n"
            r' +#[0-9a-f]{12} \{"id":"77"\} \(blue 1, green 1: total\)\n',
            done.stdout,
        ), done.stdout
        assert str(total) not in done.stdout + done.stderr
        told = json.loads(page.run(f"{diff} --json").stdout)
        [_, odd_one] = told["tables"]
        assert (told["equal"], odd_one["differing"], odd_one["columns"]) == (False, 1, ["total"])
        assert re.fullmatch(r"#[0-9a-f]{12} \(blue 1, green 1: total\)", odd_one["keys"][0])

    page.does(drop_blue)
    page.does(drop_mark)
    with psycopg.connect(page.dsn) as source:
        left = source.execute(
            "select slot_name from pg_replication_slots where database = current_database()"
        ).fetchall()
    assert left == [("cdc_shop_green",)]
