"""Promise 11: images by digest, and each container with its own secrets; read, not run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import hcl2
import yaml

from cdc_assets_tests.security.web import Asked, web

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "infra" / "docker"
DATABASES = {"SOURCE_PASSWORD", "REPLICATION_PASSWORD", "STATE_PASSWORD"}
STORE_ROOT = {"STORE_USER", "STORE_PASSWORD"}
STORE_USERS = {"LAKE_PASSWORD", "LOGS_PASSWORD", "CODE_PASSWORD"}
NEEDS = {
    "source": {"POSTGRES_PASSWORD"},
    "state": {"POSTGRES_PASSWORD"},
    "roles": {"POSTGRES_PASSWORD", "DAGSTER_PASSWORD", *DATABASES},
    "store": STORE_ROOT,
    "buckets": STORE_ROOT | STORE_USERS,
    "catalog": {"LAKE_PASSWORD"},
    "spark": {"LAKE_PASSWORD", "SPARK_TOKEN"},
    "code": {"CODE_PASSWORD", "DAGSTER_PASSWORD", "SPARK_TOKEN", *DATABASES},
    "flusher": {"LAKE_PASSWORD", "SPARK_TOKEN", *DATABASES},
    "webserver": {"LOGS_PASSWORD", "DAGSTER_PASSWORD"},
    "daemon": {"LOGS_PASSWORD", "DAGSTER_PASSWORD"},
}


def compose() -> dict[str, Any]:
    found = yaml.safe_load((DOCKER / "docker-compose.yml").read_text())
    assert isinstance(found, dict)
    return found["services"]  # type: ignore[no-any-return]


def lock() -> dict[str, str]:
    lines = (DOCKER / "images.lock").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if not line.startswith("#"))


def test_each_container_has_the_secrets_that_it_needs_and_no_other() -> None:
    secrets = set(re.findall(r"^(\w+)=", (DOCKER / "example.env").read_text(), re.MULTILINE))
    has = {
        name: set(re.findall(r"\$\{(\w+)", json.dumps(service.get("environment", {})))) & secrets
        for name, service in compose().items()
    }
    # Others may come to have a secret that isn't of this list; those of this list, nobody else.
    listed = set().union(*NEEDS.values())
    assert {name: found & listed for name, found in has.items()} == NEEDS


def test_the_stores_users_have_their_buckets_only() -> None:
    script = (DOCKER / "buckets.sh").read_text()
    users = dict(re.findall(r"^user (\w+) \"\$\w+\" (.*)$", script, re.MULTILINE))
    assert users == {"lake": "lake", "logs": "logs", "code": "lake logs"}
    assert set(re.findall(r"arn:aws:s3:::(\S+?)\"", script)) == {"$place", "$place/*"}
    assert not re.search(r"s3:\*|admin:|\"\*\"", script)


def test_every_image_is_one_version_and_goes_by_its_digest() -> None:
    images = lock()
    names = {key.removesuffix("_IMAGE") for key in images if key.endswith("_IMAGE")}
    assert images.keys() == {f"{name}_{what}" for name in names for what in ("IMAGE", "DIGEST")}
    for name in names:
        tag = images[f"{name}_IMAGE"].partition(":")[2]
        assert re.search(r"\d+\.\d+|\d{4}-\d\d-\d\d", tag), f"{name}: {tag!r} floats"
        assert re.fullmatch(r"(sha256:[0-9a-f]{64})?", images[f"{name}_DIGEST"]), name
    for name, service in compose().items():
        if "build" in service:
            assert service["build"]["args"].keys() == {"PYTHON_IMAGE", "PYTHON_DIGEST"}
            # Compose refuses a variable that is empty.
            assert all(":?" in value for value in service["build"]["args"].values())
            continue
        found = re.fullmatch(
            r"\$\{(\w+)_IMAGE:\?\}@\$\{(\w+)_DIGEST:\?make images-pin\}", service["image"]
        )
        assert found, name
        assert found[1] == found[2]
        assert found[1] in names
    dockerfile = (DOCKER / "Dockerfile").read_text()
    stages = {"build", "base"}
    for base in re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE):
        assert base in stages or base == "${PYTHON_IMAGE}@${PYTHON_DIGEST}"
    assert re.findall(r"^ARG .*", dockerfile, re.MULTILINE) == [
        "ARG PYTHON_IMAGE",  # without defaults: no image comes without a digest
        "ARG PYTHON_DIGEST",
    ]


def test_production_images_have_the_production_lock_only() -> None:
    dockerfile = (DOCKER / "Dockerfile").read_text()
    assert "requirements-dev.lock" not in dockerfile
    assert "uv pip sync" in dockerfile  # what built is taken out again
    runs = dockerfile[dockerfile.index("AS base") :]
    assert re.findall(r"COPY --from=build (\S+)", runs) == ["/opt/venv"]


def pinned(file: Path, digest: str) -> subprocess.CompletedProcess[str]:
    def registry(asked: Asked) -> tuple[int, dict[str, str], bytes]:
        if "/token" in asked.path:
            return 200, {}, b'{"token": "t"}'
        assert asked.headers["Authorization"] == "Bearer t"
        return 200, {"Docker-Content-Digest": digest}, b""

    with web(registry) as hub:
        environment = {"REGISTRY_URL": hub.url, "REGISTRY_TOKEN_URL": f"{hub.url}/token"}
        return subprocess.run(
            [sys.executable, str(ROOT / ".ci" / "images-pin"), str(file)],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=False,
        )


def test_digests_are_filled_in_from_the_registry(tmp_path: Path) -> None:
    file = tmp_path / "images.lock"
    before = (DOCKER / "images.lock").read_text()
    file.write_text(before)
    digest = f"sha256:{'a' * 64}"
    assert pinned(file, digest).returncode == 0
    assert file.read_text() == re.sub(r"_DIGEST=.*", f"_DIGEST={digest}", before)
    file.write_text(before)
    done = pinned(file, "sha256:none")
    assert done.returncode == 1
    assert "NOT PINNED: python:" in done.stderr
    assert file.read_text() == before


def test_emr_speaks_tls_between_its_nodes_and_reads_its_jars_only() -> None:
    terraform = ROOT / "infra" / "terraform"
    text = (terraform / "spark.tf").read_text()
    assert re.search(
        r"security_configuration\s+= aws_emr_security_configuration\.spark\.name", text
    )
    assert re.search(r"EnableInTransitEncryption = true", text)
    assert hcl2.loads(text)
    keys = re.findall(r'key\s+= "([^"]+)"', text)
    assert keys
    assert all(key.startswith("spark/") for key in keys)
    written = re.findall(r"for folder in \[(.*?)\]", (terraform / "access.tf").read_text())
    assert written == ['"staging", "warehouse", "logs"']
