"""What libpq makes of a DSN: its parameters with those of the environment, and what they promise.

libpq itself says which parameters there are. psycopg, ADBC and SQLAlchemy hand all of them to it;
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
# libpq marks what isn't to be shown as *, and what is for debugging or for foreign data wrappers,
# keys of SCRAM among it, as D.
SECRET = frozenset(option.keyword.decode() for option in _KNOWN if option.dispchar in (b"*", b"D"))


def from_environment() -> dict[str, str]:
    """What libpq takes from ``PG…`` variables, and the name of the system's user.

    Not PGPASSFILE: each driver looks for that itself, where it is.
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
    # What a service file has comes before the environment, and only libpq reads it.
    return given if "service" in given else from_environment() | given


def hosts(params: Mapping[str, str]) -> list[str]:
    """Where libpq connects to, in its order; an empty one is the local socket."""
    return (params.get("hostaddr") or params.get("host") or "").split(",")


def elsewhere(host: str) -> bool:
    """Whether a host is another one: neither a unix socket nor a name or address of loopback."""
    name = host.strip("[]").rstrip(".").lower()
    if not name or name.startswith(("/", "@")):
        return False
    try:
        return not ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name != "localhost" and not name.endswith(".localhost")


def sslmode(params: Mapping[str, str]) -> str:
    """The sslmode that libpq acts by: a root certificate makes ``require`` verify, as it does."""
    root = params.get("sslrootcert") or ROOT_CERTIFICATES
    mode = params.get("sslmode") or ("verify-full" if root == "system" else "prefer")
    if mode == "require" and Path(root).expanduser().exists():
        return "verify-ca"
    return mode


def verified(params: Mapping[str, str]) -> bool:
    """Whether nobody in between can read or pretend to be the server."""
    local = "service" not in params and not any(elsewhere(host) for host in hosts(params))
    kerberos = params.get("gssencmode") == "require"
    return local or kerberos or sslmode(params) in ("verify-ca", "verify-full")
