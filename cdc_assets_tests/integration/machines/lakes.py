"""What workers do on machines of their own: one copies, others merge, each with a Spark of its own.

The hub writes into the source meanwhile: a table that the lake mirrors, and one whose changes it
has as rows, which would show one that is applied twice.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from cdc_assets.config.source import SourceConfig, load_config
from cdc_assets.lake.tables import LakeTable
from cdc_assets.log.tables import GROUP
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.integration.machines.flushers import (
    TAKE_OVER_SECONDS,
    has_turn,
    until_written,
)
from cdc_assets_tests.support.flusher import Bench, bench
from cdc_assets_tests.support.ours import ADDRESSES, OURS, Site
from cdc_assets_tests.support.s3 import ObjectStore, object_store
from cdc_assets_tests.support.threads import beside
from cdc_assets_tests.support.waiting import wait_for

ORDERS, EVENTS = TableId("public", "orders"), TableId("public", "events")
SETUP = """
create table orders (id int primary key, v text);
insert into orders select g, 'v' || g from generate_series(1, 20000) g;
create table events (id int primary key, v text);
insert into events select g, 'v' || g from generate_series(1, 100) g;
"""
_CHANGE = """
update orders set v = v || '.' where id %% 50 = %(n)s %% 50;
delete from orders where id = %(n)s * 3;
insert into orders values (20000 + %(n)s, 'new');
insert into events values (100 + %(n)s, 'new');
"""

_DEFINITIONS = """
from cdc_assets.config.source import load_config
from cdc_assets.dagster.build import build_defs

defs = build_defs(load_config({!r}))
"""


@dataclass
class Lakes:
    """A source with an object store, which nobody works with yet."""

    site: Site
    source: Bench
    store: ObjectStore
    config: SourceConfig
    file: Path

    def start(self, name: str, *command: str) -> None:
        self.site.start(name, "cdc_assets", "--config", str(self.file), *command)

    def start_dagster(self, name: str) -> None:
        """A code server, Dagster's daemon and its web server: all that it starts by itself."""
        defs = self.file.with_name("defs_of_it.py")
        defs.write_text(_DEFINITIONS.format(str(self.file)))
        self.site.start(name, "dagster", "dev", "-h", "127.0.0.1", "-p", "3000", "-f", str(defs))

    def ends_well(self, name: str, *command: str) -> None:
        done = self.site.run(name, "cdc_assets", "--config", str(self.file), *command)
        assert done.returncode == 0, (done.stdout[-3000:], done.stderr[-3000:])

    def copied(self, seconds: float) -> None:
        """Wait until both tables stream."""
        states = "select 1 from _pg2iceberg.tables where state = 'streaming'"
        wait_for(lambda: len(self.source.ask_log(states)) == len(self.config.tables), seconds)

    def merged(self, seconds: float = 180) -> None:
        """Wait until what is committed now is in the lake."""
        until_written(self.source, self.config)
        ends = dict(
            self.source.ask_log(
                "select table_name, max(end_offset) from _pg2iceberg.log_index group by 1"
            )
        )
        wait_for(lambda: all(self.applied().get(name, 0) >= ends[name] for name in ends), seconds)

    def applied(self) -> Mapping[str, int]:
        """Up to which offset, by table."""
        reached = (
            'select table_name, "offset" from _pg2iceberg.mat_cursor where consumer_group = %s'
        )
        return dict(self.source.ask_log(reached, GROUP))

    @contextmanager
    def writing(self) -> Iterator[None]:
        def work(stop: threading.Event) -> None:
            number = 0
            with psycopg.connect(self.source.dsn, autocommit=True) as client:
                cursor = psycopg.ClientCursor(client)
                (first,) = cursor.execute("select max(id) - 100 from events").fetchone() or (0,)
                while not stop.wait(0.2):
                    number += 1
                    cursor.execute(_CHANGE, {"n": first + number})

        with beside(work):
            yield

    def cut_amid(self, name: str) -> None:
        """Wait until it writes to the warehouse, and cut it off from store and Postgres."""
        done = threading.Event()

        def watch(handler: Any) -> None:
            writes = handler.command == "PUT" and "/warehouse/" in handler.path
            if writes and handler.client_address[0] == ADDRESSES[name] and not done.is_set():
                self.site.cut(name, "hub")
                self.site.cut(name, "database")
                done.set()

        self.store.watch = watch
        assert done.wait(120), "it merges nothing"

    def equal(self) -> None:
        """Each change is in the lake once."""
        self.ends_well("office", "verify")
        with Pipeline.open(self.config) as pipeline:
            row = pipeline.store.table(EVENTS)
            assert row is not None
            lake = LakeTable(self.config, self.config.table(EVENTS), row)
            loaded = lake.load()
        assert loaded is not None
        found = loaded.scan(selected_fields=("id",)).to_arrow()["id"].to_pylist()
        there = [n for (n,) in self.source.execute("select id from events order by id")]
        assert sorted(found) == there


@contextmanager
def lakes(site: Site) -> Iterator[Lakes]:
    for name in OURS:
        (site.folder / f"{name}.log").unlink(missing_ok=True)
    with (
        object_store(host=ADDRESSES["hub"]) as store,
        bench(site.dsn, "merged", site.folder) as source,
    ):
        source.s3 = store.settings
        source.execute(SETUP)
        file = site.folder / "lakes.json"
        more = {
            "tables": [{"name": str(ORDERS)}, {"name": str(EVENTS), "mode": "append"}],
            "snapshot": {},
            "lake": {"catalog": {"warehouse": "s3://bucket/warehouse"}},
            "spark": {"memory": "1g"},
        }
        file.write_text(json.dumps(source.settings(flush_interval="200ms") | more))
        try:
            yield Lakes(site, source, store, load_config(file), file)
        finally:
            site.end()


def cut_off_amid_a_merge(site: Site) -> None:
    """Another follower has its tables until it is back."""
    with lakes(site) as made:
        made.start("alpha", "flush")
        made.ends_well("office", "snapshot")
        made.start("follower", "materialize", "--follow")
        with made.writing():
            made.merged()
            made.cut_amid("follower")
            made.start("office", "materialize", "--follow")
            made.merged()
            site.mend()
            made.merged()
            site.machines["office"].stop(60)
            made.merged()
        made.merged()
        site.machines["follower"].stop(60)
        made.equal()


def beside_a_code_server(site: Site) -> None:
    """Its flusher waits for another machine's, and has the turn once that one is cut off."""
    with lakes(site) as made:
        made.start("alpha", "flush")
        wait_for(lambda: has_turn(made.config, "alpha"))
        made.start_dagster("follower")
        with made.writing():
            made.copied(400)
            made.merged()
            assert has_turn(made.config, "alpha")
            site.cut("alpha", "database")
            wait_for(lambda: has_turn(made.config, "follower"), TAKE_OVER_SECONDS)
            made.merged()
            site.mend()
            made.merged()
        made.merged()
        site.machines["follower"].kill()
        made.equal()


def merged_by_clocks_apart(site: Site) -> None:
    """Copied at one time, merged at an earlier one, cared for at a later one."""
    site.set_clocks(alpha=-300, office=300)
    with lakes(site) as made:
        made.start("alpha", "flush")
        made.ends_well("office", "snapshot")
        made.start("follower", "materialize", "--follow")
        with made.writing():
            made.merged(600)
        site.machines["follower"].stop(60)
        made.ends_well("office", "maintain")
        made.equal()
