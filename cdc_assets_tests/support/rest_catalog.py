"""A server of Iceberg's REST catalog protocol, which lets nobody in unknown.

pyiceberg keeps the tables and applies what clients commit; here are the routes. A client gets a
token for its credential, as by OAuth2, or signs each request, as AWS has it. Who names the header
that catalogs hand out storage credentials by gets some with a table. What a client sent is
recorded.

Source: https://iceberg.apache.org/rest-catalog-spec/
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from pyiceberg.catalog.rest import CreateTableRequest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NamespaceNotEmptyError,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.table import CommitTableRequest, Table
from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER
from pyiceberg.table.update import SetSnapshotRefUpdate, TableUpdate

from cdc_assets_tests.support.sigv4 import Key, signed_with

CREDENTIAL = "reader:s3cret of the tests"
SCOPE = "PRINCIPAL_ROLE:ALL"
# Of the requests that are to be signed.
SERVICE, REGION = "catalog", "eu-central-1"
_CODES = {
    NoSuchNamespaceError: 404,
    NoSuchTableError: 404,
    NamespaceAlreadyExistsError: 409,
    NamespaceNotEmptyError: 409,
    TableAlreadyExistsError: 409,
    CommitFailedException: 409,
}
_JAVA_NAMES = {
    "NoSuchTableError": "NoSuchTableException",
    "NoSuchNamespaceError": "NoSuchNamespaceException",
    "TableAlreadyExistsError": "AlreadyExistsException",
    "NamespaceAlreadyExistsError": "AlreadyExistsException",
}


Answer = tuple[int, object | None]
Commit = Callable[[], Answer]


@dataclass
class RestCatalog:
    """The running server: its address, and what it was asked."""

    uri: str
    tables: SqlCatalog
    key: Key | None = None
    """What each request has to be signed with; without one, a token is wanted."""
    lent: Callable[[], dict[str, str]] = dict
    """Makes the storage credentials that come with a table."""
    renews: bool = False
    """Whether a client is told where it gets others of them."""
    renewed: set[str] = field(default_factory=set)
    """The addresses of those that got some there."""
    token_seconds: float = 3600.0
    """How long a token lives. None is exchanged for another one."""
    tokens: dict[str, float] = field(default_factory=dict)
    """When each one is over, by the monotonic clock."""
    asked: list[tuple[str, str]] = field(default_factory=list)
    located: set[str] = field(default_factory=set)
    """Where clients wanted tables to be; the server chooses it, if they don't say."""
    branches: bool = True
    """Whether it keeps branches; Nessie takes them, and forgets them."""
    config: Callable[[], dict[str, Any]] = lambda: {"defaults": {}, "overrides": {}}
    """What a client is told that opens the catalog."""
    at_commit: Callable[[Commit], Answer | None] = lambda commit: commit()
    """Makes a commit of a table, and says what is answered: None for nothing, and no line."""
    brief: int = 0
    """How often a table was loaded without its history."""
    refused: int = 0
    headers: set[str] = field(default_factory=set)
    agents: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def access(self) -> dict[str, str]:
        """The properties by which a client gets its tokens."""
        uri = f"{self.uri}/v1/oauth/tokens"
        return {"credential": CREDENTIAL, "scope": SCOPE, "oauth2-server-uri": uri}


@contextmanager
def rest_catalog(
    folder: Path,
    warehouse: str,
    files: Mapping[str, str] | None = None,
    host: str = "127.0.0.1",
    **more: Any,
) -> Iterator[RestCatalog]:
    """The server, whose tables are below ``warehouse``; ``files``: how it reaches them itself."""
    uri = f"sqlite:///{folder}/rest.db"
    tables = SqlCatalog("rest", uri=uri, warehouse=warehouse, **(files or {}))
    server = _Server((host, 0), _Handler)
    catalog = RestCatalog(f"http://{host}:{server.server_address[1]}", tables, **more)
    server.catalog = catalog  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield catalog
    finally:
        server.shutdown()
        server.server_close()


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """A client that didn't wait for its answer is its own affair."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def catalog(self) -> RestCatalog:
        found: RestCatalog = self.server.catalog  # type: ignore[attr-defined]
        return found

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""

    def _answer(self, code: int, body: object | None = None) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        self.send_response(code)
        if 300 < code < 400:
            self.send_header("Location", self.path)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _fail(self, code: int, kind: str, message: str) -> None:
        named = _JAVA_NAMES.get(kind, kind)
        self._answer(code, {"error": {"message": message, "type": named, "code": code}})

    def _serve(self) -> None:
        path = urlsplit(self.path).path
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = [unquote(part) for part in path.strip("/").split("/")][1:]
        catalog = self.catalog
        catalog.asked.append((self.command, path))
        if parts == ["oauth", "tokens"]:
            return self._token(data)
        if not self._is_known(data):
            catalog.refused += 1
            return self._fail(401, "NotAuthorizedException", "no such token")
        catalog.agents.add(self.headers.get("User-Agent", "").split("/")[0])
        catalog.headers.add(self.headers.get("X-Iceberg-Access-Delegation", ""))

        def done() -> Answer:
            with catalog.lock:
                return self._done(parts, json.loads(data) if data else {})

        commits = self.command == "POST" and parts[2:3] == ["tables"] and len(parts) == 4
        try:
            answer = catalog.at_commit(done) if commits else done()
            if answer is None:
                self.close_connection = True
            else:
                self._answer(*answer)
        except tuple(_CODES) as error:
            self._fail(_CODES[type(error)], type(error).__name__, str(error))
        except Exception as error:  # noqa: BLE001 - a client is told what a server of theirs would
            self._fail(500, type(error).__name__, str(error))

    do_GET = do_POST = do_DELETE = do_HEAD = _serve  # noqa: N815 - as the base class has them

    def _is_known(self, data: bytes) -> bool:
        key = self.catalog.key
        if key is None:
            said = self.headers.get("Authorization", "")
            return self._lives(said.removeprefix("Bearer "))
        request = (self.command, self.path, self.headers, data)
        return signed_with({key.id: key}, SERVICE, REGION, request) is not None

    def _lives(self, token: str) -> bool:
        return self.catalog.tokens.get(token, 0.0) > time.monotonic()

    def _token(self, data: bytes) -> None:
        form = {key: values[0] for key, values in parse_qs(data.decode()).items()}
        wanted = dict(zip(("client_id", "client_secret"), CREDENTIAL.split(":"), strict=True))
        if not form.items() >= {**wanted, "scope": SCOPE}.items():
            self.catalog.refused += 1
            return self._fail(401, "NotAuthorizedException", "invalid_client")
        token = secrets.token_hex(8)
        seconds = self.catalog.token_seconds
        self.catalog.tokens[token] = time.monotonic() + seconds
        answer = {"access_token": token, "token_type": "bearer", "expires_in": int(seconds)}
        kind = "urn:ietf:params:oauth:token-type:access_token"
        return self._answer(200, {**answer, "issued_token_type": kind})

    def _done(self, parts: list[str], body: dict[str, Any]) -> Answer:
        tables, verb = self.catalog.tables, self.command
        match parts:
            case ["config"]:
                return 200, self.catalog.config()
            case ["namespaces"] if verb == "POST":
                tables.create_namespace(tuple(body["namespace"]), body.get("properties") or {})
                return 200, {"namespace": body["namespace"], "properties": {}}
            case ["namespaces"]:
                return 200, {"namespaces": [list(found) for found in tables.list_namespaces()]}
            case ["namespaces", namespace]:
                known = tables.load_namespace_properties(namespace)
                if verb == "DELETE":
                    tables.drop_namespace(namespace)
                    return 204, None
                return 200, {"namespace": [namespace], "properties": known}
            case ["namespaces", namespace, "tables"] if verb == "POST":
                return 200, self._created(namespace, _wanted(body))
            case ["namespaces", namespace, "tables"]:
                tables.load_namespace_properties(namespace)
                names = [{"namespace": [n], "name": t} for n, t in tables.list_tables(namespace)]
                return 200, {"identifiers": names}
            case ["namespaces", namespace, "tables", name] if verb == "POST":
                return 200, self._committed((namespace, name), body)
            case ["namespaces", namespace, "tables", name] if verb == "DELETE":
                purge = parse_qs(urlsplit(self.path).query).get("purgeRequested") == ["true"]
                (tables.purge_table if purge else tables.drop_table)((namespace, name))
                return 204, None
            case ["namespaces", namespace, "tables", name]:
                found = self._loaded(tables.load_table((namespace, name)))
                if parse_qs(urlsplit(self.path).query).get("snapshots") == ["refs"]:
                    told = found["metadata"]
                    led_to = [ref["snapshot-id"] for ref in told["refs"].values()]
                    told["snapshots"] = [s for s in told["snapshots"] if s["snapshot-id"] in led_to]
                    self.catalog.brief += 1
                return 200, found
            case ["namespaces", _, "tables", _, "metrics"]:
                return 204, None
            case ["namespaces", _, "tables", _, "credentials"]:
                self.catalog.renewed.add(self.client_address[0])
                lent = {"prefix": "s3", "config": self.catalog.lent()}
                return 200, {"storage-credentials": [lent]}
            case ["tables", "rename"]:
                ends = (body[end] for end in ("source", "destination"))
                tables.rename_table(*((*end["namespace"], end["name"]) for end in ends))
                return 204, None
        raise NotImplementedError(f"{verb} {'/'.join(parts)}")

    def _created(self, namespace: str, wanted: CreateTableRequest) -> dict[str, Any]:
        tables = self.catalog.tables
        self.catalog.located |= {wanted.location} if wanted.location else set()
        make = tables._create_staged_table if wanted.stage_create else tables.create_table
        more = {"partition_spec": wanted.partition_spec} if wanted.partition_spec else {}
        order = wanted.write_order or UNSORTED_SORT_ORDER
        made = make(
            (namespace, wanted.name),
            wanted.table_schema,
            wanted.location,
            sort_order=order,
            properties=wanted.properties,
            **more,
        )
        return self._loaded(made, staged=bool(wanted.stage_create))

    def _loaded(self, table: Table, *, staged: bool = False) -> dict[str, Any]:
        wanted = self.headers.get("X-Iceberg-Access-Delegation") == "vended-credentials"
        lent = self.catalog.lent() if wanted else {}
        if wanted and self.catalog.renews:
            namespace, name = table.name()
            there = f"v1/namespaces/{namespace}/tables/{name}/credentials"
            lent["client.refresh-credentials-endpoint"] = there
        found = {"metadata": json.loads(table.metadata.model_dump_json()), "config": lent}
        return found if staged else {**found, "metadata-location": table.metadata_location}

    def _committed(self, identifier: tuple[str, str], body: dict[str, Any]) -> dict[str, Any]:
        body = {**body, "identifier": {"namespace": [identifier[0]], "name": identifier[1]}}
        wanted = CommitTableRequest.model_validate(body)
        named: Any = _Named(identifier)
        kept = tuple(u for u in wanted.updates if self.catalog.branches or not _branches(u))
        done = self.catalog.tables.commit_table(named, wanted.requirements, kept)
        found = json.loads(done.metadata.model_dump_json())
        return {"metadata-location": done.metadata_location, "metadata": found}


def _branches(update: TableUpdate) -> bool:
    return isinstance(update, SetSnapshotRefUpdate) and update.ref_name != MAIN_BRANCH


def _wanted(body: dict[str, Any]) -> CreateTableRequest:
    return CreateTableRequest.model_validate({"location": None, **body})


@dataclass(frozen=True)
class _Named:
    """As much of a table as ``commit_table`` asks for."""

    identifier: tuple[str, str]

    def name(self) -> tuple[str, str]:
        return self.identifier
