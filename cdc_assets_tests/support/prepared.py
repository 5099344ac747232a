"""A database that ``init`` looks at, and the script that it writes, run as an administrator."""

from __future__ import annotations

import re
import subprocess

from click.testing import CliRunner, Result

from cdc_assets.cli.main import cli
from cdc_assets.demo.schema import connection_environment
from cdc_assets.embedded.postgres import EmbeddedPostgres

HOSTILE = 'x"\n; drop table orders; --'
TABLES = f"""
create table orders (id int primary key, v text);
insert into orders select g, 'x' from generate_series(1, 1000) g;
analyze orders;
create table "My.Table" (id int primary key);
create table keyless (a int, "{HOSTILE.replace('"', '""')}" int);
create unlogged table quick (id int primary key);
create schema sales;
create table sales.parts (id int, d date, primary key (id, d)) partition by range (d);
create table sales.parts_1 partition of sales.parts for values from ('2020-01-01') to ('2030-1-1');
create table parent (id int primary key);
create table child (primary key (id)) inherits (parent);
"""
FREE = ['public."My.Table"', "public.child", "public.orders", "sales.parts"]


def ran(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(cli, [*arguments])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def paste(server: EmbeddedPostgres, admin: str, script: str, *, fails: str | None = None) -> None:
    """Into psql, as an administrator who answers its questions for passwords.

    ``fails``: words of the error that ends it.
    """
    answered = re.sub(
        r"^\\password (\S+)$", r"alter role \1 password 'pw';", script, flags=re.MULTILINE
    )
    done = subprocess.run(
        [str(server.program("psql")), "-X", "-q"],
        env=connection_environment(admin),
        input=answered,
        capture_output=True,
        text=True,
        check=False,
    )
    if fails is None:
        assert done.returncode == 0, done.stderr
        assert "ERROR" not in done.stderr
    else:
        assert done.returncode == 3
        assert fails in done.stderr
