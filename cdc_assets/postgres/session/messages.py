"""A server's messages, for those who read a session's bytes past libpq.

Sources: https://www.postgresql.org/docs/current/protocol-message-formats.html and
https://www.postgresql.org/docs/current/protocol-error-fields.html
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Final

import psycopg

COPY_DATA: Final = ord("d")
# A message's kind, and its length, which counts itself.
PREFIX: Final = struct.Struct(">BI")
# Postgres allocates 1 GB at most for a message.
LONGEST_BYTES: Final = 2**30 + 4


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
