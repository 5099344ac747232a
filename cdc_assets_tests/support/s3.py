"""An S3-protocol server on loopback with a proxy in front that fails as object stores do."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from moto.backends import get_backend
from moto.server import ThreadedMotoServer
from pyarrow import fs

from cdc_assets_tests.support.sigv4 import Key, signed_with
from cdc_assets_tests.support.waiting import wait_for

REGION = "us-east-1"
# Headers of one connection, which the proxy writes itself.
_OURS = {"expect", "connection", "transfer-encoding", "content-length"}
# Any do: the server checks none. `conftest` puts them into every process's environment.
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}

_KEY = Key(KEYS["AWS_ACCESS_KEY_ID"], KEYS["AWS_SECRET_ACCESS_KEY"])
# A program, versitygw, for tests that need no more of AWS than S3: `make test-s3`.
GATEWAY = os.environ.get("CDC_ASSETS_S3_GATEWAY", "")

Fault = Callable[["_Handler"], bool]
"""Deals with a request instead of the server: True if it did, False to let it pass."""


def status(code: int, name: str) -> Fault:
    """An error answer, as S3 words it."""

    def answer(handler: _Handler) -> bool:
        body = f"<Error><Code>{name}</Code><Message>injected</Message></Error>".encode()
        handler.send_response(code)
        handler.send_header("Content-Type", "application/xml")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)
        return True

    return answer


def cut(handler: _Handler) -> bool:
    """Hang up without a word."""
    handler.close_connection = True
    return True


def lost_answer(handler: _Handler) -> bool:
    """Do what was asked, then hang up: the caller can't know that it is done."""
    handler.forward(answer=False)
    handler.close_connection = True
    return True


def hang(seconds: float) -> Fault:
    """Say nothing for so long (or until :meth:`ObjectStore.release`), then hang up."""

    def wait(handler: _Handler) -> bool:
        handler.store.hanging += 1
        handler.store.released.wait(seconds)
        handler.close_connection = True
        return True

    return wait


@dataclass(slots=True)
class ObjectStore:
    """``faults`` is asked for each request that writes; ``requests`` counts them by method."""

    server_port: int
    own: Key
    """One that the server takes."""
    host: str = "127.0.0.1"
    watch: Callable[[_Handler], None] = lambda _: None
    """Is told of each request before it is served."""
    fault: Fault | None = None
    keys: dict[str, Key] | None = None
    """By id, those that it takes; it takes any by default."""
    refused: Counter[str] = field(default_factory=Counter)
    """Requests with no key or one that is over, by address and client."""
    requests: Counter[str] = field(default_factory=Counter)
    failed: int = 0
    hanging: int = 0
    released: threading.Event = field(default_factory=threading.Event)
    port: int = 0
    proxy: _Proxy | None = None

    @property
    def settings(self) -> dict[str, object]:
        """The configuration's ``s3``."""
        return {
            "endpoint": f"http://{self.host}:{self.port}",
            "region": REGION,
            "path_style": True,
        }

    def listed(self) -> list[str]:
        """The paths of all that is stored."""
        found = self.inside().get_file_info(fs.FileSelector("bucket", recursive=True))
        return [info.path for info in found]

    def inside(self, **more: Any) -> fs.S3FileSystem:
        """The server without its proxy."""
        return fs.S3FileSystem(
            endpoint_override=f"http://127.0.0.1:{self.server_port}",
            region=REGION,
            access_key=self.own.id,
            secret_key=self.own.secret,
            **more,
        )

    def release(self) -> None:
        """End what hangs, and let nothing hang from now on."""
        self.released.set()

    def up(self) -> None:
        """Listen, on the same port as before."""
        handler = type("Handler", (_Handler,), {"store": self})
        self.proxy = _Proxy((self.host, self.port), handler)
        self.port = self.proxy.server_address[1]
        threading.Thread(target=self.proxy.serve_forever, args=(0.05,), daemon=True).start()

    def down(self) -> None:
        """Refuse connections; those that are open are closed after their next request."""
        if self.proxy is not None:
            self.proxy.shutdown()
            self.proxy.server_close()
            self.proxy = None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: ObjectStore
    body: bytes

    def _serve(self) -> None:
        self.body = self._read()
        self.store.requests[self.command] += 1
        self.store.watch(self)
        if self.store.proxy is None:
            self.close_connection = True
            return
        asked = (self.command, self.path, self.headers, self.body)
        if self.store.keys is not None:
            key = signed_with(self.store.keys, "s3", REGION, asked)
            if key is None or key.until < time.monotonic():
                agent = self.headers.get("User-Agent", "").split("/")[0]
                self.store.refused[f"{self.client_address[0]} {agent}"] += 1
                (status(400, "ExpiredToken") if key else status(403, "AccessDenied"))(self)
                return
        fault = self.store.fault
        if fault is not None and self.command in ("PUT", "POST") and fault(self):
            self.store.failed += 1
            return
        self.forward()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve  # noqa: N815

    def _read(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass  # trailers
        return b"".join(chunks)

    def forward(self, *, answer: bool = True) -> None:
        server = http.client.HTTPConnection("127.0.0.1", self.store.server_port, timeout=60)
        try:
            server.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in _OURS:
                    server.putheader(name, value)
            server.putheader("Content-Length", str(len(self.body)))
            server.endheaders(self.body)
            reply = server.getresponse()
            content = reply.read()
        finally:
            server.close()
        if not answer:
            return
        self.send_response_only(reply.status)
        for name, value in reply.getheaders():
            if name.lower() not in _OURS:
                self.send_header(name, value)
        length = reply.getheader("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", length or str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        return


class _Proxy(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        return  # a client that was killed


@contextmanager
def object_store(
    gateway: str = "", host: str = "127.0.0.1", key: Key = _KEY
) -> Iterator[ObjectStore]:
    """A server with an empty bucket ``bucket``, reached through the proxy, which is at ``host``.

    It is moto's, which takes any key; or that of the program ``gateway``, which takes ``key``.
    """
    with _served(gateway, key) if gateway else _moto() as server_port:
        store = ObjectStore(server_port, key, host)
        store.up()
        try:
            store.inside(allow_bucket_creation=True).create_dir("bucket")
            yield store
        finally:
            store.release()
            store.down()


@contextmanager
def _moto() -> Iterator[int]:
    """The port of a server in this process.

    What earlier ones were given is forgotten: moto keeps it while the process lives.
    """
    for regions in get_backend("s3").values():
        for backend in regions.values():
            backend.reset()
    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    try:
        yield moto.get_host_and_port()[1]
    finally:
        moto.stop()


@contextmanager
def _served(gateway: str, key: Key) -> Iterator[int]:
    """The port of a versitygw, which keeps what it is given in a folder."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    keys = {"ROOT_ACCESS_KEY": key.id, "ROOT_SECRET_KEY": key.secret}
    with tempfile.TemporaryDirectory(prefix="cdc_assets-s3-") as folder:
        address = ("--port", f"127.0.0.1:{port}", "--region", REGION)
        server = subprocess.Popen(
            [gateway, *address, "--quiet", "posix", folder],
            env=keys,
            stdout=subprocess.DEVNULL,
        )
        try:
            wait_for(lambda: _listens(port))
            yield port
        finally:
            server.kill()
            server.wait()


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False
