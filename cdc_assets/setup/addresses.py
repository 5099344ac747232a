"""Addresses as they are shown: another role's, and without a password."""

from __future__ import annotations

from urllib.parse import quote, urlsplit, urlunsplit

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

HIDDEN = "…"


def of_role(dsn: str, role: str) -> str:
    """The address of the same database for ``role``, its password left to be filled in."""
    if dsn.startswith(("postgresql://", "postgres://")):
        parts = urlsplit(dsn)
        place = parts.netloc.rpartition("@")[2]
        return urlunsplit(parts._replace(netloc=f"{quote(role, safe='')}:{HIDDEN}@{place}"))
    given = {k: v for k, v in _given(dsn).items() if k not in ("user", "password")}
    return f"{make_conninfo(**given)} user={role} password={HIDDEN}".strip()


def has_password(dsn: str) -> bool:
    """Whether a password stands in the address."""
    return bool(_given(dsn).get("password"))


def user_of(dsn: str) -> str | None:
    """The role that the address names."""
    return _given(dsn).get("user")


def _given(dsn: str) -> dict[str, str]:
    try:
        return {key: str(value) for key, value in conninfo_to_dict(dsn).items()}
    except psycopg.Error:
        return {}  # whoever connects says what is wrong with it
