"""As much of Kubernetes as a Spark driver asks for: pods, whose commands are run here.

A server on loopback takes pods of one namespace, and starts the command of each as a process of
this machine, with the variables of image and pod, and no others. Fields of a pod that refer to it
are filled in; all pods have the address 127.0.0.1. Nothing is told to whoever watches: a driver
lists.
"""

from __future__ import annotations

import json
import re
import subprocess
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

ADDRESS = "127.0.0.1"
Pod = dict[str, Any]


@dataclass
class Pods:
    """``folder`` has a folder for each, where its command is run. ``image``: its variables."""

    folder: Path
    image: Mapping[str, str]
    url: str = ""
    made: dict[str, Pod] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    asked: set[tuple[str, str]] = field(default_factory=set)
    """Verbs, and of what."""

    def create(self, pod: Pod) -> Pod:
        name = pod["metadata"]["name"]
        pod["metadata"]["uid"] = str(uuid.uuid4())
        (container,) = pod["spec"]["containers"]
        home = self.folder / name
        home.mkdir()
        with (home / "log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [*container["command"], *container["args"]],
                cwd=home,
                env={**self.image, **_variables(pod, container)},
                stdout=log,
                stderr=log,
            )
        self.made[name] = pod
        return self.seen(name)

    def seen(self, name: str) -> Pod:
        phase = "Running" if self.processes[name].poll() is None else "Failed"
        return {**self.made[name], "status": {"phase": phase, "podIP": ADDRESS}}

    def delete(self, name: str) -> None:
        self.made.pop(name, None)
        if (process := self.processes.pop(name, None)) is not None:
            process.kill()
            process.wait()


def _variables(pod: Pod, container: Mapping[str, Any]) -> Mapping[str, str]:
    fields = {"status.podIP": ADDRESS, "metadata.name": pod["metadata"]["name"]}
    return {
        one["name"]: one["value"]
        if "value" in one
        else fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
        for one in container["env"]
        if "value" in one or "valueFrom" in one
    }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    pods: Pods

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        address = urlsplit(self.path)
        kind, _, name = address.path.partition("/namespaces/")[2].partition("/")[2].partition("/")
        self.pods.asked.add((self.command, kind))
        if kind != "pods":
            self._answer(404, {"kind": "Status", "code": 404})
        elif self.command == "POST":
            self._answer(201, self.pods.create(json.loads(body)))
        elif name and name not in self.pods.made:
            self._answer(404, {"kind": "Status", "code": 404})
        elif self.command == "DELETE":
            for one in [name] if name else list(self.pods.made):
                self.pods.delete(one)
            self._answer(200, {"kind": "Status", "status": "Success"})
        elif name:
            self._answer(200, self.pods.seen(name))
        else:
            wanted = dict(parse_qsl(address.query)).get("labelSelector", "")
            found = [self.pods.seen(one) for one in list(self.pods.made)]
            items = [pod for pod in found if _selected(pod["metadata"].get("labels", {}), wanted)]
            self._answer(200, {"kind": "PodList", "apiVersion": "v1", "items": items})

    do_GET = do_POST = do_DELETE = do_PATCH = _serve  # noqa: N815

    def _answer(self, code: int, body: Mapping[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        return


def _selected(labels: Mapping[str, str], selector: str) -> bool:
    pairs = re.findall(r"([^,=!]+)(!?=)([^,]*)", selector)
    return all((labels.get(key) == value) == (sign == "=") for key, sign, value in pairs)


@contextmanager
def kubernetes_of(folder: Path, image: Mapping[str, str]) -> Iterator[Pods]:
    """The server; its pods end with it."""
    pods = Pods(folder, image)
    handler = type("Handler", (_Handler,), {"pods": pods})
    server = ThreadingHTTPServer((ADDRESS, 0), handler)
    pods.url = f"http://{ADDRESS}:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield pods
    finally:
        for name in list(pods.made):
            pods.delete(name)
        server.shutdown()
        server.server_close()
