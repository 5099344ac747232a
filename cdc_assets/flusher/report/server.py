"""The flusher's port: /metrics for Prometheus, /live and /ready for whoever watches processes.

Off by default, and on loopback unless told otherwise. Any other path is told nothing. With
``metrics.token`` so is /metrics for whoever hasn't got it.
"""

from __future__ import annotations

import hmac
import json
import logging
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from cdc_assets.config.alerts import MetricsConfig
from cdc_assets.flusher.report.probes import Verdict
from cdc_assets.process.helper_thread import Note
from cdc_assets.process.traces import noted

logger = logging.getLogger(__name__)

# A client that says nothing for so long is hung up on.
_SILENT_SECONDS = 10.0
# Connections at a time. A scrape and a probe a second need two; the files and threads that the
# process may have are the stream's.
_MOST_CONNECTIONS = 16

Probes = Mapping[str, Callable[[], Verdict]]
"""By path."""


class _Server(ThreadingHTTPServer):
    def __init__(self, config: MetricsConfig, collectors: list[Collector], probes: Probes) -> None:
        self.probes = probes
        self.registry = CollectorRegistry()
        for collector in collectors:
            self.registry.register(collector)
        self.token = config.token.get_secret_value() if config.token is not None else None
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)
        self.address_family = found[0][0]
        self._places = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        self._open = dict[socket.socket, None]()  # the oldest one comes first
        super().__init__((config.host, config.port or 0), _Request)

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's asks for the address's name, which may hang

    def process_request(self, request: Any, client_address: Any) -> None:
        """The oldest connection gives way: whoever asks is answered at once, and is never that."""
        if not self._places.acquire(blocking=False):
            for oldest in list(self._open)[:1]:
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._places.acquire()
        self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        del self._open[request]
        self._places.release()

    def handle_error(self, *_: object) -> None:
        error = sys.exception()
        if isinstance(error, Exception) and not isinstance(error, OSError):  # who asked went away
            logger.warning("a request for metrics failed: %s", noted(error))


class _Request(BaseHTTPRequestHandler):
    server: _Server
    timeout = _SILENT_SECONDS
    # Not which Python this is.
    server_version, sys_version = "cdc_assets", ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if (probe := self.server.probes.get(path)) is not None:
            verdict = probe()
            status = HTTPStatus.OK if verdict.is_well else HTTPStatus.SERVICE_UNAVAILABLE
            told = {"status": verdict.status}
            told |= {"reason": verdict.reason} if verdict.reason is not None else {}
            self._answer(status, json.dumps(told).encode(), {"Content-Type": "application/json"})
        elif path != "/metrics":
            self._answer(HTTPStatus.NOT_FOUND)
        elif not self._may():
            self._answer(HTTPStatus.UNAUTHORIZED, headers={"WWW-Authenticate": "Bearer"})
        else:
            try:
                encode, kind = choose_encoder(self.headers.get("Accept", ""))
            except TypeError:  # it compares a version that is none
                encode, kind = choose_encoder("")
            self._answer(HTTPStatus.OK, encode(self.server.registry), {"Content-Type": kind})

    def _may(self) -> bool:
        if self.server.token is None:
            return True
        given = self.headers.get("Authorization", "")
        return hmac.compare_digest(given.encode(), f"Bearer {self.server.token}".encode())

    def _answer(
        self, status: HTTPStatus, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing: a probe every second would fill the log."""


class MetricsServer:
    """Serves where ``config`` says; nothing if it has no port.

    A port that is taken (by a flusher that is just ending, or that waits for its turn) is logged,
    noted and tried again: missing metrics must not make WAL pile up.
    """

    def __init__(
        self, config: MetricsConfig, collectors: list[Collector], probes: Probes, note: Note
    ) -> None:
        self._config = config
        self._collectors = collectors
        self._probes = probes
        self._note = note
        self._server: _Server | None = None
        self._said = False

    def ensure(self) -> None:
        """Begin to serve, if not yet; a failure is logged once."""
        if self._server is not None or self._config.port is None:
            return
        address = f"{self._config.host}:{self._config.port}"
        try:
            self._server = _Server(self._config, self._collectors, self._probes)
        except OSError as error:
            trouble = f"metrics can't be served at {address} ({error.strerror or error})"
            self._note("metrics port", trouble)
            if not self._said:
                self._said = True
                logger.warning(
                    "%s; trying again. Set metrics.port or metrics.host to another one if it isn't"
                    " another flusher's.",
                    trouble,
                )
            return
        self._note("metrics port", None)
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()
        logger.info("metrics are served at http://%s/metrics", address)

    def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
