"""Names of rows in messages: a hash of the key, and the key itself only if asked.

A hash is short, always the same, and salted by a number that only the coordination database has: a
reader of messages can tell rows apart and match them with those that ``verify --show-keys`` lists,
and can't try keys out. A row of a table without a key has nothing but its values, which no setting
puts into a message.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from hashlib import sha256
from secrets import token_hex

from cdc_assets.lake.tables import LakeTable
from cdc_assets.log.store import LogStore

NameKey = Callable[[str], str]
"""From the text of a key (``rows.as_key``) to its name in messages."""

# Hexadecimal digits: among millions of rows two hardly ever have the same name.
_DIGITS = 12
_SALT = "key_salt"


def salt(store: LogStore) -> str:
    """The source's salt, made when it is first needed."""
    store.connection.execute(
        "insert into pipeline_meta (source, key, value) values (%s, %s, %s) on conflict do nothing",
        (store.source, _SALT, token_hex(32)),
    )
    row = store.connection.execute(
        "select value from pipeline_meta where source = %s and key = %s", (store.source, _SALT)
    ).fetchone()
    assert row is not None  # some process has made it by now
    return str(row[0])


def hashed(secret: str, table: object, key: str) -> str:
    """The name of a row by its key."""
    said = f"{table}\0{key}".encode("utf-8", "surrogatepass")
    return "#" + hmac.new(secret.encode(), said, sha256).hexdigest()[:_DIGITS]


def key_names(store: LogStore, lake: LakeTable, *, asked: bool = False) -> NameKey:
    """The names of rows of ``lake``; ``asked``: by a person, who alone sees the answer."""
    secret, table = salt(store), lake.row.table
    shown = asked or (lake.config.verify.show_keys and bool(lake.key))

    def name(key: str) -> str:
        called = hashed(secret, table, key)
        return f"{called} {key}" if shown else called

    return name
