"""The roles of ``infra/postgres/roles.sql`` in a database of a test's own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cdc_assets.demo.schema import connection_environment
from cdc_assets.embedded.postgres import EmbeddedPostgres

FILE = Path(__file__).parents[2] / "infra" / "postgres" / "roles.sql"
ROLES = {
    "cdc_source": "it's a secret",
    "cdc_replication": "r",
    "cdc_state": "b",
    "cdc_catalog": "c",
}


def dsn_of(database: str, role: str) -> str:
    """The DSN of one of the roles."""
    return make_conninfo(database, user=role, password=ROLES[role])


def apply_roles(postgres: EmbeddedPostgres, dsn: str, tables: str) -> str:
    """Run the file as a person does, by psql; returns its warnings."""
    given = {
        "ON_ERROR_STOP": "1",
        "database": str(conninfo_to_dict(dsn)["dbname"]),
        "tables": tables,
        **{role.replace("cdc_", "") + "_password": secret for role, secret in ROLES.items()},
        "publication": "cdc_src",
    }
    variables = [part for key, value in given.items() for part in ("-v", f"{key}={value}")]
    done = subprocess.run(
        [str(postgres.program("psql")), "-X", "-q", *variables, "-f", str(FILE)],
        env=connection_environment(dsn),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return "\n".join(line for line in done.stderr.splitlines() if "WARNING" in line)


@contextmanager
def dropped_after(dsn: str, *more: str) -> Iterator[None]:
    """Roles are the server's: these, and ``more``, go with the block."""
    roles = [*ROLES, *more]
    try:
        yield
    finally:
        with psycopg.connect(dsn, autocommit=True) as owner:
            owner.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where usename = any(%s)",
                (roles,),
            )
            owner.execute(
                "select pg_drop_replication_slot(slot_name) from pg_replication_slots"
                " where database = current_database()"
            )
            made = owner.execute(
                "select rolname from pg_roles where rolname = any(%s)", (roles,)
            ).fetchall()
            for (role,) in made:
                owner.execute(f"drop owned by {role} cascade; drop role {role}".encode())
