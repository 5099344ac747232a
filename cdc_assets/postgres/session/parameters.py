"""A DSN as libpq reads it: its parameters with those of the environment, and their safety.

libpq itself lists the parameters. psycopg and SQLAlchemy hand all of them to it;
``postgres.session.jdbc`` decides about each for the one driver that isn't libpq.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from pathlib import Path

from psycopg import pq
from psycopg.conninfo import conninfo_to_dict

# A user's default authorities; libpq verifies by them as if sslrootcert named them.
ROOT_CERTIFICATES = "~/.postgresql/root.crt"

_KNOWN = pq.Conninfo.get_defaults()
KNOWN = frozenset(option.keyword.decode() for option in _KNOWN)
# libpq marks secrets as *, and parameters for debugging or for foreign data wrappers, SCRAM keys
# among them, as D.
SECRET = frozenset(option.keyword.decode() for option in _KNOWN if option.dispchar in (b"*", b"D"))


def from_environment() -> dict[str, str]:
    """The parameters that libpq takes from ``PG…`` variables, and the name of the system's user.

    Not PGPASSFILE: each driver looks for that itself, on its own machine.
    """
    return {
        option.keyword.decode(): option.val.decode()
        for option in pq.Conninfo.get_defaults()
        if option.val not in (None, option.compiled) and option.keyword != b"passfile"
    }


def resolved(dsn: str) -> dict[str, str]:
    """The DSN's parameters and those of the environment that it doesn't give, as libpq has them.

    They hold for a driver that doesn't know the variables, and on another machine.
    """
    given = {key: str(value) for key, value in conninfo_to_dict(dsn).items() if value is not None}
    # A service file's values come before the environment's, and only libpq reads it.
    return given if "service" in given else from_environment() | given


def hosts(params: Mapping[str, str]) -> list[str]:
    """Where libpq connects to, in its order; an empty one is the local socket."""
    return (params.get("hostaddr") or params.get("host") or "").split(",")


def elsewhere(host: str) -> bool:
    """Whether a host is another machine: neither a unix socket nor a loopback name or address."""
    name = host.strip("[]").rstrip(".").lower()
    if not name or name.startswith(("/", "@")):
        return False
    try:
        return not ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name != "localhost" and not name.endswith(".localhost")


def sslmode(params: Mapping[str, str]) -> str:
    """The sslmode that libpq acts by: a root certificate makes ``require`` verify."""
    root = params.get("sslrootcert") or ROOT_CERTIFICATES
    mode = params.get("sslmode") or ("verify-full" if root == "system" else "prefer")
    if mode == "require" and Path(root).expanduser().exists():
        return "verify-ca"
    return mode


def verified(params: Mapping[str, str]) -> bool:
    """Whether no third party can read, or pretend to be the server."""
    local = "service" not in params and not any(elsewhere(host) for host in hosts(params))
    kerberos = params.get("gssencmode") == "require"
    return local or kerberos or sslmode(params) in ("verify-ca", "verify-full")
