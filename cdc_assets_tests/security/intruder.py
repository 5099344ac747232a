"""Another local user who tries what is there to be tried; prints as JSON what came of it.

``python -m cdc_assets_tests.security.intruder`` reads ``{"ports": [...], "paths": [...]}``, imports
what it needs as the user of the tests, who may be alone in reaching the programs, and then is
``nobody`` for good. Of each port it tells what answered each of the attacks: ``granted`` with what
was got, ``refused`` with the words, or nothing where the port speaks another protocol. Of paths it
tells those that it could look into.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401 - asked for by name, and nobody may read it
import json
import os
import pwd
import select
import socket
import struct
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from typing import Any

import grpc  # type: ignore[import-untyped]
from psycopg import pq
from pyspark.sql.connect.proto import base_pb2

_SECONDS = 5.0
_SERVICE = base_pb2.DESCRIPTOR.services_by_name["SparkConnectService"]


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), _SECONDS)


def _asked(port: int, request: bytes) -> bytes:
    """What is answered until the other side ends, or says no more."""
    answer = b""
    with suppress(OSError), connect(port) as link:
        link.sendall(request)
        while more := link.recv(65536):
            answer += more
            link.settimeout(1.0)
    return answer


def postgres(port: int) -> str | None:
    """Every way in that a lax pg_hba.conf may have."""
    said = None
    for password in (None, "", "postgres"):
        for database in ("dbname=postgres", "dbname=postgres replication=database"):
            given = f" password='{password}'" if password is not None else ""
            dsn = f"host=127.0.0.1 port={port} user=postgres {database}{given}"
            answer = _connected(dsn, 3.0)
            if answer == "":
                return f"granted: {dsn}"
            said = answer or said
    return f"refused: {said}" if said is not None and "password" in said else None


def _connected(dsn: str, seconds: float) -> str | None:
    """What is said instead of a connection, nothing if there is one; None: no answer in time.

    Closed for sure: what is open keeps a server that serves one connection at a time.
    """
    until, link = time.monotonic() + seconds, pq.PGconn.connect_start(dsn.encode())
    try:
        while (state := link.connect_poll()) in (
            pq.PollingStatus.READING,
            pq.PollingStatus.WRITING,
        ):
            reads = [link.socket] if state == pq.PollingStatus.READING else []
            writes = [] if reads else [link.socket]
            if not any(select.select(reads, writes, [], max(0.0, until - time.monotonic()))):
                return None
        return "" if state == pq.PollingStatus.OK else link.error_message.decode()
    finally:
        link.finish()


def spark_connect(port: int, token: str | None = None) -> str | None:
    """Every call of the service without a token, and with wrong ones; or with the one given."""
    answers = set()
    given = [None, "", "wrong"] if token is None else [token]
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        for method in _SERVICE.methods:
            kind = "stream" if method.server_streaming else "unary"
            sends = "stream" if method.client_streaming else "unary"
            request = getattr(base_pb2, method.input_type.name)()
            request.session_id = "00112233-4455-6677-8899-aabbccddeeff"
            call = getattr(channel, f"{sends}_{kind}")(
                f"/{_SERVICE.full_name}/{method.name}", type(request).SerializeToString
            )
            for each in given:
                metadata = () if each is None else (("authorization", f"Bearer {each}"),)
                try:
                    answer = call(
                        iter([request]) if sends == "stream" else request,
                        timeout=_SECONDS,
                        metadata=metadata,
                    )
                    if kind == "stream":
                        next(answer, None)
                    answers.add(f"{method.name} answers")
                except grpc.RpcError as error:
                    answers.add(error.code().name)
                    if error.code().name in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
                        return None
    return "refused" if answers == {"UNAUTHENTICATED"} else f"granted: {sorted(answers)}"


def spark_transport(port: int) -> str | None:
    """Blocks, and a file of the driver's, as another executor asks for them."""

    def text(value: str) -> bytes:
        return struct.pack(">i", len(value)) + value.encode()

    # org.apache.spark.network.shuffle.protocol.OpenBlocks of one block
    blocks = b"\0" + text("app") + text("0") + struct.pack(">i", 1) + text("broadcast_0")
    rpc = b"\3" + struct.pack(">qi", 1, len(blocks)) + blocks
    stream = b"\6" + text("/jars/org.postgresql_postgresql-42.7.11.jar")
    refused = None
    for message in (rpc, stream):
        answer = _asked(port, struct.pack(">q", 8 + len(message)) + message)
        if len(answer) <= 8 or struct.unpack(">q", answer[:8])[0] > 2**20:
            continue
        if answer[8] in (1, 4, 7):  # ChunkFetchSuccess, RpcResponse, StreamResponse
            return f"granted: {answer[8:200]!r}"
        refused = f"refused: {answer[8:120]!r}"
    return refused


def py4j(port: int) -> str | None:
    """A Java object, without the gateway's token and with a wrong one."""
    command = b"r\nu\njava.lang.Runtime\nrj\ne\n"
    for before in (b"", b"A\nwrong\ne\n"):
        answer = _asked(port, before + command)
        if b"!y" in answer:
            return f"granted: {answer!r}"
        if answer.startswith(b"!x"):
            return f"refused: {answer!r}"
    return None


def python_worker(port: int) -> str | None:
    """A worker of Spark's Python daemon, which tells its pid and then asks for the secret."""
    secret = b"wrong"
    with suppress(OSError), connect(port) as link:
        link.settimeout(2.0)
        if len(link.recv(4)) == 4:
            link.sendall(struct.pack(">i", len(secret)) + secret)
            outcome = {b"\0\0\0\3err": "refused", b"\0\0\0\2ok": "granted"}
            return outcome.get(link.recv(4096))
    return None


def accumulators(port: int) -> str | None:
    """PySpark's server of accumulators, whose secret is as long as this one.

    It serves one connection after the other: those of the attacks before come first.
    """
    with suppress(OSError), connect(port) as link:
        link.settimeout(2 * _SECONDS)
        try:
            link.sendall(b"0" * 64)
            link.sendall(struct.pack(">i", 1))
            answer = link.recv(16)
        except ConnectionError:  # it hung up before it had read what came last
            answer = b""
        if answer == b"\1":  # it took them
            return f"granted: {answer!r}"
        return "refused: it hung up" if not answer else None
    return None


# Those of the metrics, and of whoever else speaks HTTP.
PATHS = ("/", "/metrics", "/live", "/ready")


def http(port: int) -> str | None:
    """The bodies by path, whatever their status; refused: all are empty."""
    bodies = dict[str, str]()
    for path in PATHS:
        url = f"http://127.0.0.1:{port}{path}"
        try:
            with urllib.request.urlopen(url, timeout=_SECONDS) as answer:
                bodies[path] = answer.read().decode()
        except urllib.error.HTTPError as refusal:
            with refusal:
                bodies[path] = refusal.read().decode()
        except (OSError, HTTPException):
            return None
    return f"{'granted' if any(bodies.values()) else 'refused'}: {json.dumps(bodies)}"


ATTACKS: tuple[Callable[[int], str | None], ...] = (
    http,
    postgres,
    spark_connect,
    spark_transport,
    py4j,
    python_worker,
    accumulators,
)


def _attacked(port: int) -> dict[str, str]:
    return {attack.__name__: said for attack in ATTACKS if (said := attack(port))}


def became_nobody() -> None:
    user = pwd.getpwnam("nobody")
    os.setgroups([])
    os.setresgid(user.pw_gid, user.pw_gid, user.pw_gid)
    os.setresuid(user.pw_uid, user.pw_uid, user.pw_uid)


def _read(path: str) -> bytes:
    with open(path, "rb") as file:  # noqa: PTH123 - Path would normalize it
        return file.read(1)


def looked_into(path: str) -> bool:
    """Whether its content, or so much as its size, was seen."""
    looks: tuple[Callable[[str], object], ...] = (os.stat, os.listdir, _read)
    for look in looks:
        with suppress(OSError):
            look(path)
            return True
    return False


def main() -> None:
    wanted: dict[str, Any] = json.load(sys.stdin)
    became_nobody()
    ports = wanted.get("ports", [])
    # Most of an attack is waiting for an answer that doesn't come.
    with ThreadPoolExecutor(max(1, len(ports))) as pool:
        attacked = dict(zip(ports, pool.map(_attacked, ports), strict=True))
    # On a busy machine an answer may come too late; alone, it should not.
    attacked |= {port: _attacked(port) for port, said in attacked.items() if not said}
    found = {
        "ports": attacked,
        "paths": [path for path in wanted.get("paths", []) if looked_into(path)],
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
