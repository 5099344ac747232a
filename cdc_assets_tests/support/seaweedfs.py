"""SeaweedFS: an object store with a REST catalog of its tables, which people run; Go builds it.

A client's key is its credential at the catalog, by OAuth2. With a table the catalog lends a key
that opens the table's folder alone.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import boto3
import pytest
from pyarrow import fs

from cdc_assets.lake.spark.jars import cache_folder
from cdc_assets_tests.support.s3 import REGION
from cdc_assets_tests.support.waiting import wait_for

# A commit, as its releases have names that Go doesn't take. What it needs is in its own go.sum.
VERSION = "v0.0.0-20261109003541-7506e5f91cd6"
_MODULE = f"github.com/seaweedfs/seaweedfs@{VERSION}"
_SUM = "h1:LOYZFToHq9F7pSR6lkPGfkM8RmHlVFrzndKdhmNZjrU="

WAREHOUSE = "lakehouse"
# Clients have to fetch tokens anew before long.
TOKEN_SECONDS = 12
_SERVICES = (
    *("master.port", "master.port.grpc", "volume.port", "volume.port.grpc"),
    *("filer.port", "filer.port.grpc", "s3.port", "s3.port.grpc", "s3.port.iceberg"),
)
_ROLE = "arn:aws:iam::000000000000:role/lender"


@dataclass(frozen=True, slots=True)
class SeaweedFs:
    """The running server; its table bucket is WAREHOUSE."""

    s3: str
    catalog: str
    key_id: str
    secret: str

    def listed(self) -> list[str]:
        """The paths of all files of its tables."""
        store = fs.S3FileSystem(
            endpoint_override=self.s3,
            region=REGION,
            access_key=self.key_id,
            secret_key=self.secret,
        )
        found = store.get_file_info(fs.FileSelector(WAREHOUSE, recursive=True))
        return [info.path for info in found if info.is_file]


def built() -> Path:
    """The program, which takes minutes the first time. Skips the test where it can't be had."""
    if (go := shutil.which("go")) is None:
        pytest.skip("there is no Go, which builds SeaweedFS")
    asked = [go, "mod", "download", "-json", _MODULE]
    got = subprocess.run(asked, cwd="/", capture_output=True, text=True, check=False)
    if got.returncode:
        pytest.skip(f"SeaweedFS can't be had: {got.stdout}{got.stderr}")
    found = json.loads(got.stdout)
    assert found["Sum"] == _SUM
    program = cache_folder().parent / "seaweedfs" / VERSION / "weed"
    subprocess.run([go, "build", "-C", found["Dir"], "-o", str(program), "./weed"], check=True)
    return program


@contextmanager
def seaweedfs(folder: Path) -> Iterator[SeaweedFs]:
    """A server of its own, with what it keeps in a folder."""
    program, key = built(), (secrets.token_hex(8), secrets.token_hex(16))
    ports = _free_ports()
    (access := folder / "access.json").write_text(json.dumps(_access(*key)))
    given = {
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "dir": str(folder),
        "master.telemetry": "false",
        "s3": "true",
        "s3.port.lance": "0",
        "s3.config": str(access),
        "s3.iam.config": str(access),
        "s3.iceberg.credentialRole": _ROLE,
        "volume.preStopSeconds": "0",
        "volume.max": "0",  # as many as there is room for: each bucket takes seven
        "filer.localSocket": str(folder / "filer.sock"),
        "s3.localSocket": str(folder / "s3.sock"),
        **{name: str(port) for name, port in ports.items()},
    }
    environment = os.environ | {"ICEBERG_OAUTH_TOKEN_EXPIRY": str(TOKEN_SECONDS)}
    command = [str(program), "server", *(f"-{name}={value}" for name, value in given.items())]
    s3, catalog = (f"http://127.0.0.1:{ports[name]}" for name in ("s3.port", "s3.port.iceberg"))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        wait_for(lambda: _answers(f"{catalog}/v1/config"))
        tables = boto3.client(
            "s3tables",
            endpoint_url=s3,
            region_name=REGION,
            aws_access_key_id=key[0],
            aws_secret_access_key=key[1],
        )
        tables.create_table_bucket(name=WAREHOUSE)
        yield SeaweedFs(s3, catalog, *key)
    finally:
        process.terminate()  # it removes its sockets
        process.wait(60)


def _access(key_id: str, secret: str) -> dict[str, object]:
    """One identity, and the role whose keys the catalog lends."""
    everything = {"Effect": "Allow", "Action": "*", "Resource": "*"}
    trusting = {
        "Effect": "Allow",
        "Principal": {"Federated": "iceberg-catalog"},
        "Action": "sts:AssumeRoleWithCredentials",
    }
    signing_key = base64.b64encode(secrets.token_bytes(32)).decode()
    return {
        "identities": [
            {
                "name": "owner",
                "credentials": [{"accessKey": key_id, "secretKey": secret}],
                "actions": ["Admin", "Read", "Write", "List", "Tagging"],
            }
        ],
        "sts": {
            "issuer": "tests",
            "signingKey": signing_key,
            "tokenDuration": "1h",
            "maxSessionLength": "1h",
        },
        "policies": [{"name": "everything", "document": _document(everything)}],
        "roles": [
            {
                "roleName": _ROLE.rpartition("/")[2],
                "roleArn": _ROLE,
                "trustPolicy": _document(trusting),
                "attachedPolicies": ["everything"],
            }
        ],
    }


def _document(statement: Mapping[str, object]) -> dict[str, object]:
    return {"Version": "2012-10-17", "Statement": [statement]}


def _free_ports() -> dict[str, int]:
    with ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in _SERVICES]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return {n: p.getsockname()[1] for n, p in zip(_SERVICES, probes, strict=True)}


def _answers(address: str) -> bool:
    with suppress(OSError), urlopen(address, timeout=1.0):
        return True
    return False
