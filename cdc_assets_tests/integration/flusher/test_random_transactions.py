"""Anything in any order, on tables of each identity: the log equals what was sent."""

from __future__ import annotations

import random

import psycopg
import pytest

from cdc_assets.postgres.slots import current_lsn
from cdc_assets_tests.support import pgoutput as beside
from cdc_assets_tests.support.flusher import Bench, flushing
from cdc_assets_tests.support.waiting import wait_for


class _Chaos:
    """Random transactions on four tables of different identities; some change the tables."""

    TABLES = ("keyed", "indexed", "whole", "loose")

    def __init__(self, connection: psycopg.Connection[tuple[object, ...]], seed: int) -> None:
        self.run = connection.execute
        self.random = random.Random(seed)
        self.columns = {table: ["a", "doc"] for table in self.TABLES}
        self.added = 0

    def transaction(self) -> None:
        before = {table: [*columns] for table, columns in self.columns.items()}
        self.run("begin")
        for _ in range(self.random.randint(0, 6)):
            self.step(0)
        how = self.random.choices(["commit", "rollback", "prepare"], [8, 1, 1])[0]
        if how != "prepare":
            self.run(how.encode())
        else:
            how = self.random.choice(["commit", "rollback"])
            self.run("prepare transaction 'chaos'")
            self.run(f"{how} prepared 'chaos'".encode())
        if how == "rollback":
            self.columns = before

    def step(self, depth: int) -> None:
        table = self.random.choice(self.TABLES)
        kind = self.random.choices(
            ["insert", "update", "key", "delete", "truncate", "alter", "savepoint"],
            [8, 8, 3, 3, 1, 1, 3],
        )[0]
        if kind == "insert":
            self.insert(table)
        elif kind == "update":
            column = self.random.choice(self.columns[table])
            self.run(f"update {table} set {column} = {self.value()} where {self.some()}".encode())
        elif kind == "key":
            self.run(f"update {table} set id = id + 100000 where {self.some()}".encode())
        elif kind == "delete":
            self.run(f"delete from {table} where {self.some()}".encode())
        elif kind == "truncate":
            several = self.random.sample(self.TABLES, self.random.randint(1, 2))
            self.run(f"truncate {', '.join(several)}".encode())
        elif kind == "alter" and depth == 0:
            self.alter(table)
        elif kind == "savepoint" and depth < 3:
            self.run(f"savepoint s{depth}".encode())
            for _ in range(self.random.randint(1, 4)):
                self.step(depth + 1)
            if self.random.random() < 0.5:
                self.run(f"rollback to s{depth}".encode())

    def insert(self, table: str) -> None:
        columns = self.columns[table]
        values = ", ".join(self.value() for _ in columns)
        count = self.random.choice([1, 1, 5, 40])
        self.run(
            f"insert into {table} (id, k, {', '.join(columns)}) select nextval('ids'), 'k' || g,"
            f" {values} from generate_series(1, {count}) g".encode()
        )

    def alter(self, table: str) -> None:
        if len(self.columns[table]) > 2 and self.random.random() < 0.5:
            self.run(f"alter table {table} drop column {self.columns[table].pop()}".encode())
            return
        self.added += 1
        self.columns[table].append(f"more{self.added}")
        self.run(f"alter table {table} add column more{self.added} text default 'd'".encode())

    def some(self) -> str:
        return f"id % {self.random.randint(2, 7)} = {self.random.randint(0, 3)}"

    def value(self) -> str:
        return self.random.choice(
            ["null", "''", "'x'", "repeat('toast', 1000)", r"e'q\"\\ \n\t'", "'naïve 🎉'", "'{}'"]
        )


def _chaos(source: Bench, seed: int) -> None:
    source.execute("""
        create sequence ids;
        create table keyed (id int primary key, k text, a text, doc text);
        create table indexed (id int not null, k text not null, a text, doc text);
        create unique index by_both on indexed (k, id);
        alter table indexed replica identity using index by_both;
        create table whole (id int primary key, k text, a text, doc text);
        alter table whole replica identity full;
        create table loose (id int, k text, a text, doc text);
        alter table loose replica identity full;
        alter table keyed alter a set storage external, alter doc set storage external;
        alter table indexed alter a set storage external, alter doc set storage external;
        alter table whole alter a set storage external, alter doc set storage external;
        alter table loose alter a set storage external, alter doc set storage external;
    """)
    keys: dict[str, tuple[str, ...]] = {
        "public.keyed": ("id",),
        "public.indexed": ("k", "id"),
        "public.whole": ("id",),
        "public.loose": (),
    }
    config = source.config(*keys, flush_bytes="64kB", flush_interval="20ms")
    source.flush(config)
    beside.open_beside(source)
    chaos = _Chaos(source.connection, seed)
    with flushing(config):
        for _ in range(60):
            chaos.transaction()
        written = current_lsn(source.connection)
        wait_for(lambda: source.flushed() >= written)
    beside.assert_log_is_what_was_sent(source, keys, beside.frames(source))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_transactions(source: Bench, seed: int) -> None:
    _chaos(source, seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 200))
def test_random_transactions_for_long(any_source: Bench, seed: int) -> None:
    _chaos(any_source, seed)
