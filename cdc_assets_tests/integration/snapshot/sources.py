"""Tables to be copied, and a role that is no superuser."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from cdc_assets.log.copies.chunks import chunks
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support.lake import Lake

T, U = TableId("public", "t"), TableId("public", "u")
PAIR = """
create table t (id int primary key, v text not null);
insert into t select i, 'old ' || i from generate_series(1, 1000) i;
create table u as table t;
alter table u add primary key (id);
"""
LONG_PAIR = """
create table t (id int primary key, v text not null);
insert into t select i, 'old ' || i from generate_series(1, 5000) i;
create table u (id int primary key, v text not null);
insert into u select i, 'old ' || i from generate_series(1, 5000) i;
"""
WIDE = """
create table t (id int primary key, v text not null, pad text);
insert into t select i, 'old ' || i, repeat('x', 100) from generate_series(1, 20000) i;
"""


def chunk_keys(source: Lake, table: TableId = T) -> list[str]:
    """Of the table's first copy."""
    return [chunk.key for chunk in chunks(source.pipeline.store, table, 1)]


@contextmanager
def role(dsn: str, *settings: str) -> Iterator[tuple[str, str]]:
    """``(name, dsn)`` of a role that replicates and is no superuser; it owns what it makes."""
    name, password = f"test_{secrets.token_hex(4)}", secrets.token_hex(8)
    parts = conninfo_to_dict(dsn)
    with psycopg.connect(dsn, autocommit=True) as superuser:
        superuser.execute("set lock_timeout = '20s'")
        who = sql.Identifier(name)
        superuser.execute(
            sql.SQL("create role {} login replication password {}").format(who, password)
        )
        superuser.execute(
            sql.SQL("grant create on database {} to {}").format(
                sql.Identifier(str(parts["dbname"])), who
            )
        )
        superuser.execute(sql.SQL("grant create on schema public to {}").format(who))
        for setting in settings:
            superuser.execute(b"alter role %s set %s" % (name.encode(), setting.encode()))
        try:
            address = f"{parts['host']}:{parts['port']}/{parts['dbname']}"
            yield name, f"postgresql://{name}:{password}@{address}"
        finally:
            superuser.execute(
                "select pg_terminate_backend(pid, 5000) from pg_stat_activity where usename = %s",
                [name],
            )
            superuser.execute(sql.SQL("drop owned by {} cascade").format(who))
            superuser.execute(sql.SQL("drop role {}").format(who))
