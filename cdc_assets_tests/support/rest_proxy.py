"""A proxy before a REST catalog's server, by which commits of tables meet what tests have for them.

What is told to wait reaches the server when the test has it so, as after a network's whims.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

Answer = tuple[int, bytes]
Forward = Callable[[], Answer]

UNAVAILABLE = (504, b'{"error": {"message": "later", "type": "Gateway", "code": 504}}')


@dataclass
class Proxy:
    """``at_commit``: makes a commit of a table, or doesn't, and answers."""

    uri: str
    server: str
    at_commit: Callable[[Forward], Answer] = lambda commit: commit()
    asked: int = 0


@contextmanager
def rest_proxy(server: str) -> Iterator[Proxy]:
    running = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    proxy = Proxy(f"http://127.0.0.1:{running.server_address[1]}", server)
    running.proxy = proxy  # type: ignore[attr-defined]
    threading.Thread(target=running.serve_forever, daemon=True).start()
    try:
        yield proxy
    finally:
        running.shutdown()
        running.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""

    def _serve(self) -> None:
        proxy: Proxy = self.server.proxy  # type: ignore[attr-defined]
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        proxy.asked += 1
        # As it is now: a later request of the connection has others.
        kept = {k: v for k, v in self.headers.items() if k.lower() not in _HOPS}
        command, path = self.command, self.path

        def forward() -> Answer:
            connection = HTTPConnection(urlsplit(proxy.server).netloc, timeout=60)
            connection.request(command, path, data, kept)
            answer = connection.getresponse()
            found = answer.status, answer.read()
            connection.close()
            return found

        parts = urlsplit(self.path).path.strip("/").split("/")
        commits = self.command == "POST" and parts[-2] == "tables" and parts[-1] != "rename"
        code, body = proxy.at_commit(forward) if commits else forward()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_POST = do_DELETE = do_HEAD = _serve  # noqa: N815 - as the base class has them


_HOPS = {"host", "connection", "accept-encoding", "transfer-encoding"}
