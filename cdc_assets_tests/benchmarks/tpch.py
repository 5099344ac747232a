"""The TPC-H tables in a Postgres database of their own, one a scale, made once and kept.

``tpchgen-cli`` writes the rows and COPY takes them, without a file in between. The table
``tpch_loaded`` is made last: a database without it, or with one of other definitions, is made anew.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

# As in the specification's clause 1.4; its identifiers need 64 bits where they grow with the scale.
TABLES = {
    "region": """
        r_regionkey int primary key, r_name char(25) not null, r_comment varchar(152)""",
    "nation": """
        n_nationkey int primary key, n_name char(25) not null, n_regionkey int not null,
        n_comment varchar(152)""",
    "supplier": """
        s_suppkey bigint primary key, s_name char(25) not null, s_address varchar(40) not null,
        s_nationkey int not null, s_phone char(15) not null, s_acctbal numeric(15,2) not null,
        s_comment varchar(101) not null""",
    "customer": """
        c_custkey bigint primary key, c_name varchar(25) not null, c_address varchar(40) not null,
        c_nationkey int not null, c_phone char(15) not null, c_acctbal numeric(15,2) not null,
        c_mktsegment char(10) not null, c_comment varchar(117) not null""",
    "part": """
        p_partkey bigint primary key, p_name varchar(55) not null, p_mfgr char(25) not null,
        p_brand char(10) not null, p_type varchar(25) not null, p_size int not null,
        p_container char(10) not null, p_retailprice numeric(15,2) not null,
        p_comment varchar(23) not null""",
    "partsupp": """
        ps_partkey bigint, ps_suppkey bigint, ps_availqty int not null,
        ps_supplycost numeric(15,2) not null, ps_comment varchar(199) not null,
        primary key (ps_partkey, ps_suppkey)""",
    "orders": """
        o_orderkey bigint primary key, o_custkey bigint not null, o_orderstatus char(1) not null,
        o_totalprice numeric(15,2) not null, o_orderdate date not null,
        o_orderpriority char(15) not null, o_clerk char(15) not null, o_shippriority int not null,
        o_comment varchar(79) not null""",
    "lineitem": """
        l_orderkey bigint, l_partkey bigint not null, l_suppkey bigint not null, l_linenumber int,
        l_quantity numeric(15,2) not null, l_extendedprice numeric(15,2) not null,
        l_discount numeric(15,2) not null, l_tax numeric(15,2) not null,
        l_returnflag char(1) not null, l_linestatus char(1) not null, l_shipdate date not null,
        l_commitdate date not null, l_receiptdate date not null, l_shipinstruct char(25) not null,
        l_shipmode char(10) not null, l_comment varchar(44) not null,
        primary key (l_orderkey, l_linenumber)""",
}
_VERSION = hashlib.sha256(repr(TABLES).encode()).hexdigest()[:12]
_PIECE_BYTES = 2**20

Connection = psycopg.Connection[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Tpch:
    """A loaded database; ``rows`` by table."""

    scale: float
    dsn: str
    rows: dict[str, int]

    @property
    def total_rows(self) -> int:
        return sum(self.rows.values())


def prepare(server_dsn: str, scale: float, say: Callable[[str], None]) -> Tpch:
    """The database of that scale, loaded now or by an earlier run."""
    name = f"tpch_{scale:g}".replace(".", "_")
    dsn = make_conninfo(server_dsn, dbname=name)
    with psycopg.connect(server_dsn, autocommit=True) as server:
        present = server.execute("select from pg_database where datname = %s", (name,)).fetchall()
        rows = _loaded(dsn) if present else None
        if rows is None:
            say(f"loading TPC-H at scale {scale:g} into the database {name}")
            database = sql.Identifier(name)
            server.execute(sql.SQL("drop database if exists {} with (force)").format(database))
            server.execute(sql.SQL("create database {}").format(database))
            rows = _load(dsn, scale, say)
    return Tpch(scale, dsn, rows)


def _loaded(dsn: str) -> dict[str, int] | None:
    with psycopg.connect(dsn) as connection:
        found = connection.execute("select to_regclass('public.tpch_loaded')").fetchone()
        if found == (None,):
            return None
        rows = connection.execute(
            "select table_name, row_count from tpch_loaded where version = %s", (_VERSION,)
        ).fetchall()
    return dict(rows) or None


def _load(dsn: str, scale: float, say: Callable[[str], None]) -> dict[str, int]:
    rows = {}
    with psycopg.connect(dsn, autocommit=True) as connection:
        for table, columns in TABLES.items():
            began = time.perf_counter()
            connection.execute(f"create table {table} ({columns})".encode())
            rows[table] = _copy_in(connection, table, scale)
            say(f"  {table}: {rows[table]:,} rows in {time.perf_counter() - began:.1f} s")
        # Frozen: no autovacuum and no hint bits that a first reader would have to write.
        connection.execute("vacuum (freeze, analyze)")
        connection.execute("checkpoint")
        with connection.transaction():
            connection.execute(
                "create table tpch_loaded (table_name text primary key, row_count bigint not null,"
                " version text not null)"
            )
            connection.cursor().executemany(
                "insert into tpch_loaded values (%s, %s, %s)",
                [(table, count, _VERSION) for table, count in rows.items()],
            )
    return rows


def _copy_in(connection: Connection, table: str, scale: float) -> int:
    generator = subprocess.Popen(
        [
            str(Path(sys.executable).with_name("tpchgen-cli")), "csv", "--quiet", "--stdout",
            "--scale-factor", f"{scale:g}", "--tables", table,
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    with generator, connection.cursor() as cursor:
        assert generator.stdout is not None
        # Nothing becomes visible of what a generator that failed has written.
        with connection.transaction():
            with cursor.copy(f"copy {table} from stdin (format csv, header)".encode()) as copy:
                while piece := generator.stdout.read(_PIECE_BYTES):
                    copy.write(piece)
            if (code := generator.wait()) != 0:
                raise RuntimeError(f"tpchgen-cli ended with {code} while it wrote {table}")
        return cursor.rowcount
