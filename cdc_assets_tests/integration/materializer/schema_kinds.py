"""Kinds of schema changes, each a table of its own with DDL and changes around it."""

from __future__ import annotations

from dataclasses import dataclass

from cdc_assets_tests.support.lake import Lake

PLAIN = "create table {t} (id int primary key, v text, n int)"

ROWS = "insert into {t} select i, 'v' || i, i from generate_series(1, 5) i"


@dataclass(frozen=True)
class Kind:
    """DDL with changes around it; ``{t}`` is the table. ``extra``: what the lake keeps besides.

    Statements are of one transaction, unless two semicolons part them.
    """

    name: str
    script: str
    create: str = PLAIN
    rows: str = ROWS
    extra: tuple[str, ...] = ()

    def sql(self, text: str) -> str:
        return text.replace("{t}", self.name)

    def run(self, source: Lake) -> None:
        for transaction in self.sql(self.script).split(";;"):
            source.execute(transaction)


KINDS = [
    Kind(
        "added",  # constants of several types; rows before it in the same transaction
        "update {t} set v = 'before' where id = 1;"
        " alter table {t} add c int default 5, add d numeric(8,2) default 1.5,"
        " add a text[] default '{x,\"y z\"}', add b bytea default '\\x0102', add nothing date;"
        " update {t} set n = 9 where id = 2; insert into {t} values (10, 'x', 1);"
        " alter table {t} alter c drop default; insert into {t} values (11, 'y', 2)",
    ),
    Kind(
        "quoted",  # a default that is hard to write down; no row follows
        "alter table {t} add c text default e'it''s \\\\ \"q\" ${x} \\n end'",
    ),
    Kind(
        "volatile",  # each row its own; a serial is a volatile default
        "alter table {t} add u uuid not null default gen_random_uuid(), add s serial;"
        " update {t} set n = 0 where id = 3",
    ),
    Kind(
        "dropped",
        "update {t} set v = 'before' where id = 1; alter table {t} drop v;"
        " update {t} set n = 9 where id = 2; delete from {t} where id = 4",
        extra=("v",),
    ),
    Kind(
        "renamed",  # two swap their names, the key has another
        "update {t} set v = 'before' where id = 1;"
        " alter table {t} rename v to t; alter table {t} rename w to v;"
        " alter table {t} rename t to w; alter table {t} rename id to nr;"
        " update {t} set n = 9 where nr = 2; update {t} set nr = 50 where nr = 5;"
        " delete from {t} where nr = 4",
        "create table {t} (id int primary key, v text, w text, n int)",
        "insert into {t} select i, 'v' || i, 'w' || i, i from generate_series(1, 5) i",
    ),
    Kind(
        "widened",
        "insert into {t} values (6, 1, 1, 0.1, 1.5, 'ab');;"
        " alter table {t} alter s type int, alter i type bigint, alter r type float8,"
        " alter d type numeric(12,2), alter v type text;"
        " insert into {t} values (7, 100000, 10000000000, 0.1, 9999999999.25, repeat('x', 20))",
        "create table {t} (id int primary key, s int2, i int, r real, d numeric(6,2),"
        " v varchar(5))",
        "insert into {t} select i, i, i, i + 0.1, i + 0.25, i from generate_series(1, 5) i",
    ),
    Kind(
        "again",  # dropped and added under its name, twice, in one transaction
        "update {t} set v = 'before' where id = 1; alter table {t} drop v;"
        " alter table {t} add v int default 7; update {t} set n = 8 where id = 2;"
        " alter table {t} drop v; alter table {t} add v timestamptz;"
        " update {t} set v = '2026-01-01' where id = 3",
        extra=("v__dropped_2", "v__dropped_4"),
    ),
    Kind(
        "rekeyed",
        "insert into {t} values (6, 'v6', 6); alter table {t} drop constraint {t}_pkey;"
        " alter table {t} add primary key (v); update {t} set n = 9 where v = 'v2';"
        " update {t} set v = 'other' where v = 'v3'; delete from {t} where v = 'v4'",
    ),
    Kind(
        "unseen",  # its relation is what it was before
        "alter table {t} drop n, add n int default 3; update {t} set v = 'x' where id = 2",
        extra=("n__dropped_3",),
    ),
    Kind(
        "labels",
        "insert into {t} values (3, 'low');; alter type level add value 'mid' before 'high';;"
        " insert into {t} values (4, 'mid')",
        "create type level as enum ('low', 'high'); create table {t} (id int primary key, l level)",
        "insert into {t} values (1, 'low'), (2, 'high')",
    ),
    Kind(
        "toast",  # unchanged values across a rename: their column has another name by then
        "update {t} set n = 9 where id = 2; alter table {t} rename v to doc;"
        " update {t} set n = 8 where id = 3; update {t} set id = 20 where id = 2",
        "create table {t} (id int primary key, v text, n int); alter table {t} alter v set storage"
        " external",
        "insert into {t} select i, repeat('v' || i, 2000), i from generate_series(1, 5) i",
    ),
    Kind(
        "parts",  # what older rows show is known to the partitions only
        "alter table {t} add c int default 5; alter table {t} alter c drop default;"
        " update {t} set n = 9 where id = 2",
        "create table {t} (id int primary key, v text, n int) partition by range (id);"
        " create table {t}_low partition of {t} for values from (0) to (4);"
        " create table {t}_high partition of {t} for values from (4) to (99)",
    ),
    Kind(
        "heapless",  # there was nothing to be copied: the first merge makes the lake's table
        "create table {t}_all partition of {t} default;; insert into {t} values (1, 'x', 1);;"
        " alter table {t} add c int default 5; insert into {t} values (2, 'y', 2, 6)",
        "create table {t} (id int primary key, v text, n int) partition by range (id)",
        "select",
    ),
    Kind(
        "several",  # one after the other in one batch
        "update {t} set v = 'a' where id = 1;; alter table {t} add c int default 1;;"
        " update {t} set v = 'b' where id = 2;; alter table {t} rename c to d;"
        " update {t} set d = 5 where id = 3; alter table {t} alter d type bigint;"
        " update {t} set d = 50000000000 where id = 4; truncate {t};"
        " insert into {t} values (1, 'after', 1); alter table {t} drop v;"
        " insert into {t} values (2, 2, 2)",
        extra=("v",),
    ),
]

ALL = [kind.name for kind in KINDS]

HARD = ["added", "renamed", "again", "heapless", "several"]
