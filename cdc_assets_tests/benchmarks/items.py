"""A table of any number of rows with the usual types, in a database of its own."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from cdc_assets_tests.benchmarks.workplace import forget

# A row's columns after its key ``g``.
ROW = (
    "(random() * 1e6)::int, md5(g::text) || 'abcdefgh', (random() * 1e8)::numeric(18, 2),"
    " timestamptz '2026-01-01 00:00Z' + g * interval '1 second',"
    " jsonb_build_object('a', g, 'b', left(md5((g + 1)::text), 20), 'c', array[1, 2])"
)


def prepare(server_dsn: str, rows: int, say: Callable[[str], None], which: str = "") -> str:
    """The database, ``which`` of several, with the table of that size; an earlier run's goes."""
    template, name = f"items_{rows}", f"bench_items_{rows}{which}"
    with psycopg.connect(server_dsn, autocommit=True) as server:
        if not server.execute(
            "select from pg_database where datname = %s and datistemplate", (template,)
        ).fetchall():
            say(f"making a table of {rows:,} rows")
            server.execute(sql.SQL("drop database if exists {}").format(sql.Identifier(template)))
            server.execute(sql.SQL("create database {}").format(sql.Identifier(template)))
            with psycopg.connect(make_conninfo(server_dsn, dbname=template), autocommit=True) as db:
                db.execute(
                    "create table items (id bigint primary key, a int, v text, n numeric(18, 2),"
                    " at timestamptz, j jsonb)"
                )
                db.execute(
                    f"insert into items select g, {ROW} from generate_series(1, {rows}) g".encode()
                )
                db.execute("vacuum (freeze, analyze) items")
            server.execute(
                sql.SQL("alter database {} is_template true").format(sql.Identifier(template))
            )
        forget(server, name)
        server.execute(
            sql.SQL("create database {} template {} strategy file_copy").format(
                sql.Identifier(name), sql.Identifier(template)
            )
        )
    return make_conninfo(server_dsn, dbname=name)
