"""Servers on loopback that messages are sent to: HTTP for webhooks, SMTP for mail."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Inbox:
    """What arrived; the next ``refusals`` attempts are refused, as are those that have ``poison``.

    ``status``: of a refusal, 0 for none: it hangs up; a redirect leads to ``location``.
    ``retry_after``: seconds that are asked for with it.
    """

    port: int = 0
    refusals: int = 0
    poison: str | None = None
    status: int = 503
    location: str = ""
    retry_after: int = 0
    attempts: int = 0
    received: list[Any] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def refuses(self, said: str = "") -> bool:
        self.attempts += 1
        if self.poison is not None and self.poison in said:
            return True
        if self.refusals:
            self.refusals -= 1
            return True
        return False


@contextmanager
def webhook() -> Iterator[Inbox]:
    """An HTTP server that takes JSON; it refuses with its status."""
    inbox = Inbox()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            refused = inbox.refuses(body.decode())
            if not refused:
                assert self.headers["Content-Type"] == "application/json"
                inbox.received.append(json.loads(body))
                inbox.sizes.append(len(body))
                inbox.requests.append((self.path, self.headers.get("Authorization", "")))
            if refused and not inbox.status:
                return  # HTTP/1.0: that ends the connection
            self.send_response(inbox.status if refused else 200)
            if inbox.location:
                self.send_header("Location", inbox.location)
            if inbox.retry_after:
                self.send_header("Retry-After", str(inbox.retry_after))
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_PUT = do_POST  # noqa: N815 -- the name that the server calls

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with _serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler), inbox):
        yield inbox


@contextmanager
def mailbox() -> Iterator[Inbox]:
    """An SMTP server as RFC 5321 has it, as far as a client without extensions asks."""
    inbox = Inbox()

    class Handler(socketserver.StreamRequestHandler):
        def say(self, line: str) -> None:
            self.wfile.write(f"{line}\r\n".encode())

        def handle(self) -> None:
            if inbox.refuses():
                self.say("421 try again later")
                return
            self.say("220 test")
            while line := self.rfile.readline().decode().strip():
                word = line.split()[0].upper()
                if word == "DATA":
                    self.say("354 go on")
                    body = b""
                    while (part := self.rfile.readline()) != b".\r\n":
                        body += part
                    inbox.received.append(body.decode())
                self.say("221 bye" if word == "QUIT" else "250 ok")
                if word == "QUIT":
                    return

    with _serving(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler), inbox):
        yield inbox


@contextmanager
def _serving(server: socketserver.TCPServer, inbox: Inbox) -> Iterator[None]:
    inbox.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
