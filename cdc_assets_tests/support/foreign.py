"""A table of another database, as a foreign table: by Debian's Postgres, which has postgres_fdw."""

from __future__ import annotations

from psycopg.conninfo import conninfo_to_dict

REMOTE = """
create table far (id int primary key, v text, updated_at timestamptz not null default now());
create index on far (updated_at);
"""


def foreign(remote: str, name: str = "f") -> str:
    """The SQL that makes ``name`` in another database, of the table ``far`` of ``remote``."""
    to = conninfo_to_dict(remote)
    password = f", password '{to['password']}'" if to.get("password") else ""
    return f"""
    create extension if not exists postgres_fdw with schema public;
    create server elsewhere foreign data wrapper postgres_fdw
      options (host '{to["host"]}', port '{to["port"]}', dbname '{to["dbname"]}');
    create user mapping for current_user server elsewhere options (user '{to["user"]}'{password});
    create foreign table {name} (id int, v text, updated_at timestamptz) server elsewhere
      options (table_name 'far');
    """
