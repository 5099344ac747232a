"""Addresses as they are shown: another role's, and without anything that is a secret."""

from __future__ import annotations

from urllib.parse import quote, urlencode

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cdc_assets.postgres.session.parameters import SECRET

HIDDEN = "…"
_PLACE = ("host", "port", "dbname", "user", "password")


def of_role(dsn: str, role: str) -> str:
    """The address of the same database for ``role``, its password left to be filled in."""
    given = {key: value for key, value in _given(dsn).items() if key not in SECRET}
    host, port = given.get("host", ""), given.get("port", "")
    if not host or host.startswith(("/", "@")) or "," in host + port or "service" in given:
        rest = {key: value for key, value in given.items() if key != "user"}
        return f"{make_conninfo(**rest)} {make_conninfo(user=role)} password={HIDDEN}".strip()
    place = f"[{host}]" if ":" in host else quote(host)
    place += f":{port}" if port else ""
    more = {key: value for key, value in given.items() if key not in _PLACE}
    address = f"postgresql://{quote(role, safe='')}:{HIDDEN}@{place}"
    address += f"/{quote(given['dbname'], safe='')}" if "dbname" in given else ""
    return address + (f"?{urlencode(more, quote_via=quote)}" if more else "")


def has_password(dsn: str) -> bool:
    """Whether a password, or another secret, stands in the address."""
    return bool(SECRET & _given(dsn).keys())


def user_of(dsn: str) -> str | None:
    """The role that the address names."""
    return _given(dsn).get("user")


def _given(dsn: str) -> dict[str, str]:
    try:
        return {key: str(value) for key, value in conninfo_to_dict(dsn).items()}
    except psycopg.Error:
        return {}  # whoever connects says what is wrong with it
