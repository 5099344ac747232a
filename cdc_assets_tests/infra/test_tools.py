"""The files of infra/, as the tools take them that will read them; ``make test-infra`` builds some.

Each is skipped where its tool isn't installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from cdc_assets_tests.infra.test_files import DOCKER, INFRA
from cdc_assets_tests.support.manifests import FOLDER

# Where kubeconform finds Kubernetes' schemas: its own default is on the network.
SCHEMAS = os.environ.get("CDC_ASSETS_KUBERNETES_SCHEMAS", "default")


def _run(*command: str, cwd: Path, more: Mapping[str, str] | None = None) -> str:
    done = _ended(*command, cwd=cwd, more=more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _ended(
    *command: str, cwd: Path, given: str = "", more: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    environment = {**os.environ, **(more or {})}
    return subprocess.run(
        command, cwd=cwd, input=given, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(params=[False, True], ids=["one pod", "executors"])
def built(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, list[dict[str, Any]]]:
    """What kustomize makes of the folder, as a text and read; with the component, or without."""
    folder = tmp_path / "kubernetes"
    shutil.copytree(FOLDER, folder)
    file = folder / "kustomization.yaml"
    if request.param:
        file.write_text(file.read_text().replace("# components:", "components:"))
    text = _run("kustomize", "build", ".", cwd=folder)
    return text, list(yaml.safe_load_all(text))


def test_kubernetes_takes_what_kustomize_builds(built: tuple[str, list[dict[str, Any]]]) -> None:
    text, manifests = built
    checked = ("kubeconform", "-strict", "-summary", "-schema-location", SCHEMAS)
    done = _ended(*checked, cwd=FOLDER, given=text)
    if "failed downloading schema" in done.stdout:
        pytest.skip("Kubernetes' schemas can't be fetched: see CDC_ASSETS_KUBERNETES_SCHEMAS")
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"Valid: (\d+), Invalid: 0, Errors: 0", done.stdout)
    assert found is not None
    assert int(found[1]) == len(manifests)
    assert {manifest["metadata"].get("namespace") for manifest in manifests} == {"cdc-assets"}


def test_executors_have_the_image_of_the_server(built: tuple[str, list[dict[str, Any]]]) -> None:
    (spark,) = [
        manifest["spec"]["template"]["spec"]
        for manifest in built[1]
        if manifest["kind"] == "Deployment" and manifest["metadata"]["name"] == "spark"
    ]
    (container,) = spark["containers"]
    variables = {one["name"]: one.get("value") for one in container["env"]}
    assert (
        variables["SPARK_IMAGE"] == container["image"] == "registry.example/cdc-assets-spark:0.1.0"
    )
    assert spark["securityContext"]["runAsNonRoot"] is True
    maps = {one["metadata"]["name"] for one in built[1] if one["kind"] == "ConfigMap"}
    assert {
        volume["configMap"]["name"] for volume in spark["volumes"] if "configMap" in volume
    } <= maps


def test_compose_reads_it() -> None:
    asked = ("docker", "compose", "version")
    if shutil.which("docker") is None or subprocess.run(asked, check=False).returncode:
        pytest.skip("docker compose is not installed")
    names = re.findall(r"^(\w+_DIGEST)=", (DOCKER / "images.lock").read_text(), re.MULTILINE)
    digests = dict.fromkeys(names, f"sha256:{'0' * 64}")
    files = ("--env-file", "images.lock", "--env-file", "example.env")
    told = _run("docker", "compose", *files, "config", cwd=DOCKER, more=digests)
    services = yaml.safe_load((DOCKER / "docker-compose.yml").read_text())["services"]
    assert yaml.safe_load(told)["services"].keys() == services.keys()


def test_terraform_has_its_own_form() -> None:
    _run("terraform", "fmt", "-check", "-diff", cwd=INFRA / "terraform")
