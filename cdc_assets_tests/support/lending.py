"""A REST catalog that lends keys of an object store, where nobody else has one that it takes.

Each load of a table lends another key. The warehouse has a name, of which only the catalog knows
where it is.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cdc_assets_tests.support.rest_catalog import RestCatalog, rest_catalog
from cdc_assets_tests.support.s3 import ObjectStore
from cdc_assets_tests.support.sigv4 import Key


@dataclass
class Lending:
    """The running catalog; the store, and how long it takes a key that was lent."""

    server: RestCatalog
    store: ObjectStore
    seconds: float = math.inf

    @property
    def lent(self) -> dict[str, Key]:
        keys = list((self.store.keys or {}).values())
        return {key.id: key for key in keys if key.token is not None}

    def end(self) -> None:
        """Let all that was lent be over."""
        assert self.store.keys is not None
        self.store.keys |= {name: replace(key, until=0.0) for name, key in self.lent.items()}

    def lend(self) -> dict[str, str]:
        """The properties that come with a table."""
        until = time.monotonic() + self.seconds
        expires = {}
        if self.seconds < math.inf:
            at = int(1000 * (time.time() + self.seconds))
            expires["s3.session-token-expires-at-ms"] = str(at)
        key = Key(secrets.token_hex(8), secrets.token_hex(16), secrets.token_hex(16), until)
        assert self.store.keys is not None
        assert key.token is not None
        self.store.keys[key.id] = key
        return {
            "s3.endpoint": str(self.store.settings["endpoint"]),
            "s3.access-key-id": key.id,
            "s3.secret-access-key": key.secret,
            "s3.session-token": key.token,
            **expires,
        }

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration's ``lake``.

        Version 2: pyiceberg, which the server keeps its tables by, upgrades none to 3.
        """
        delegated = {"header.X-Iceberg-Access-Delegation": "vended-credentials"}
        catalog = {
            "type": "rest",
            "uri": self.server.uri,
            "warehouse": "analytics",
            "properties": self.server.access | delegated,
            "locations": ["s3://bucket"],
        }
        return {"catalog": catalog, "format_version": 2}


@contextmanager
def lending(
    folder: Path, store: ObjectStore, seconds: float = math.inf, **more: Any
) -> Iterator[Lending]:
    """The catalog, of whose keys each lives for ``seconds``."""
    own = Key("catalog", secrets.token_hex(16))
    store.keys = {own.id: own}
    files = {
        "s3.endpoint": str(store.settings["endpoint"]),
        "s3.region": str(store.settings["region"]),
        "s3.force-virtual-addressing": "false",
        "s3.access-key-id": own.id,
        "s3.secret-access-key": own.secret,
    }
    with rest_catalog(folder, "s3://bucket/warehouse", files, **more) as server:
        made = Lending(server, store, seconds)
        server.lent = made.lend
        yield made
