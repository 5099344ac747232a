"""What a server says in an ErrorResponse, for those who read a session's bytes past libpq.

Source: https://www.postgresql.org/docs/current/protocol-error-fields.html
"""

from __future__ import annotations

from collections.abc import Mapping

import psycopg


def error_fields(body: bytes) -> Mapping[str, str]:
    """The fields of an ErrorResponse, by their letters."""
    parts = (part for part in body.split(b"\0") if part)
    return {chr(part[0]): part[1:].decode(errors="replace") for part in parts}


def described(fields: Mapping[str, str]) -> str:
    """Its message, with detail, hint and context in lines of their own, as libpq has them."""
    message = fields.get("M", "")
    for key, name in (("D", "DETAIL"), ("H", "HINT"), ("W", "CONTEXT")):
        if key in fields:
            message += f"\n{name}:  {fields[key]}"
    return message


def server_error(body: bytes) -> psycopg.Error:
    """The error as psycopg raises it, with its SQL state."""
    fields = error_fields(body)
    state = fields.get("C", "")
    try:
        kind = psycopg.errors.lookup(state)
    except KeyError:
        kind = type("ServerError", (psycopg.DatabaseError,), {"sqlstate": state or None})
    return kind(described(fields))
