"""Spark's executors as pods: what the manifests name is there, and a driver starts executors so."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from cdc_assets.lake.spark.session import connected
from cdc_assets.process.machine import java_command
from cdc_assets.readiness.executors.findings import python_findings
from cdc_assets_tests.infra.test_files import DOCKER, ROOT
from cdc_assets_tests.support.jvm import QUICK_JVM
from cdc_assets_tests.support.manifests import (
    FOLDER,
    known,
    kustomization,
    manifests,
    named,
    policies_name_pods,
)
from cdc_assets_tests.support.metrics import free_port
from cdc_assets_tests.support.pods import ADDRESS, kubernetes_of
from cdc_assets_tests.support.waiting import wait_for

EXECUTORS = FOLDER / "executors"
HERE = "/opt/spark/executors"


def _loaded(name: str) -> dict[str, Any]:
    found = yaml.safe_load((EXECUTORS / name).read_text())
    assert isinstance(found, dict)
    return found


def _properties(file: Path) -> dict[str, str]:
    lines = (line.strip() for line in file.read_text().splitlines())
    pairs = (line.split(maxsplit=1) for line in lines if line and not line.startswith("#"))
    return dict(pairs)


def test_each_file_of_the_component_is_applied() -> None:
    component = kustomization(EXECUTORS)
    (made,) = component["configMapGenerator"]
    files = {*component["resources"], *made["files"], *(p["path"] for p in component["patches"])}
    assert files | {"kustomization.yaml"} == {file.name for file in EXECUTORS.iterdir()}
    assert component["namespace"] == kustomization()["namespace"]
    assert "# components: [executors]" in (FOLDER / "kustomization.yaml").read_text()


def test_kubernetes_knows_each_field_of_the_component() -> None:
    for manifest in manifests(folder=EXECUTORS):
        known(manifest)
    known(_loaded("executor.yaml"))
    patch = _loaded("spark.yaml")
    patch["spec"]["selector"] = {}  # of the Deployment that is patched
    known(patch)


def test_the_component_names_what_is_there() -> None:
    patch, base = _loaded("spark.yaml"), named("Deployment")["spark"]
    template = patch["spec"]["template"]["spec"]
    (container,) = template["containers"]
    (there,) = base["spec"]["template"]["spec"]["containers"]
    assert patch["metadata"]["name"] == base["metadata"]["name"]
    assert container["name"] == there["name"]
    assert template["serviceAccountName"] in named("ServiceAccount", EXECUTORS)
    (volume,), (made,) = template["volumes"], kustomization(EXECUTORS)["configMapGenerator"]
    assert volume["configMap"]["name"] == made["name"]
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == [HERE]
    variables = {one["name"] for one in (*container["env"], *there["env"])}
    used = {arg.partition("$(")[2].rstrip(")") for arg in container["args"] if "$(" in arg}
    assert used <= variables
    assert {"name": "SPARK_CONF_DIR", "value": HERE} in container["env"]
    properties = _properties(EXECUTORS / "spark-defaults.conf")
    assert properties["spark.kubernetes.executor.podTemplateFile"] == f"{HERE}/executor.yaml"
    assert properties["spark.kubernetes.namespace"] == kustomization()["namespace"]
    account = properties["spark.kubernetes.authenticate.executor.serviceAccountName"]
    assert named("ServiceAccount")[account]["automountServiceAccountToken"] is False
    assert not properties.keys() & _properties(DOCKER / "spark.properties").keys()


def test_policies_of_the_component_open_the_ports_that_spark_has() -> None:
    properties = _properties(EXECUTORS / "spark-defaults.conf")
    ports = {int(value) for key, value in properties.items() if key.endswith("ort")}
    opened = set[int]()
    for policy in named("NetworkPolicy", EXECUTORS).values():
        for rule in policy["spec"]["ingress"]:
            opened |= {port["port"] for port in rule["ports"]}
    assert opened == ports
    spark = named("Deployment")["spark"]["spec"]["template"]["metadata"]["labels"]
    pods = {"spark": spark, "executor": _loaded("executor.yaml")["metadata"]["labels"]}
    policies_name_pods(named("NetworkPolicy", EXECUTORS), pods)


@pytest.fixture
def folder(public_directory: Path) -> Path:
    made = public_directory / f"pods-{secrets.token_hex(4)}"
    (made / "conf").mkdir(parents=True)
    (made / "bin").mkdir()
    # What the image has, and this system may lack.
    (made / "bin" / "tini").write_text('#!/bin/sh\nshift\nexec "$@"\n')
    (made / "bin" / "tini").chmod(0o755)
    return made


@pytest.mark.spark
def test_a_driver_with_these_settings_starts_executors_that_run_our_python(folder: Path) -> None:
    java = Path(java_command(os.environ) or "java")
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{java.parent}:/usr/bin:/bin"
    image = {"PATH": path, "PYTHONPATH": str(ROOT)}
    port = free_port()
    with kubernetes_of(folder, image) as pods:
        _configure(folder, port)
        token = secrets.token_hex(8)
        with (folder / "log").open("wb") as log:
            driver = subprocess.Popen(
                _arguments(folder, pods.url),
                cwd=folder,
                env={
                    **image,
                    "SPARK_CONF_DIR": str(folder / "conf"),
                    "SPARK_CONNECT_AUTHENTICATE_TOKEN": token,
                    **QUICK_JVM,
                },
                stdout=log,
                stderr=log,
            )
        try:
            wait_for(lambda: _says(folder / "log", "Spark Connect server started", driver), 120)
            wait_for(lambda: len(pods.made) == 2, 60)
            url = f"sc://{ADDRESS}:{port}/;authorization=Bearer%20{token}"
            session = connected(url)
            logs = [folder / name / "log" for name in pods.made]
            wait_for(lambda: all(_says(log, "Successfully registered") for log in logs), 120)
            assert list(python_findings(session)) == []
            session.stop()
            assert {kind for _, kind in pods.asked} == {"pods"}
        finally:
            driver.terminate()
            driver.wait()


def _configure(folder: Path, port: int) -> None:
    """The files as they are, but for their places, sizes and how often pods are listed."""
    shutil.copy(EXECUTORS / "executor.yaml", folder / "conf")
    defaults = (EXECUTORS / "spark-defaults.conf").read_text().replace(HERE, str(folder / "conf"))
    more = "spark.kubernetes.executor.enableApiWatcher false\n"
    more += "spark.kubernetes.executor.apiPollingInterval 1s\n"
    more += "spark.kubernetes.allocation.driver.readinessTimeout 1s\n"
    defaults = defaults.replace("4g", "512m").replace("2g", "512m")
    (folder / "conf" / "spark-defaults.conf").write_text(defaults + more)
    own = _properties(DOCKER / "spark.properties") | {
        "spark.driver.memory": "512m",
        "spark.connect.grpc.binding.address": ADDRESS,
        "spark.connect.grpc.binding.port": str(port),
        "spark.sql.execution.pyspark.python": sys.executable,
    }
    scheduler = "spark.scheduler.allocation.file"
    for key in ("spark.jars", "spark.sql.extensions", scheduler):  # of the image
        del own[key]
    text = "".join(f"{key} {value}\n" for key, value in own.items())
    (folder / "spark.properties").write_text(text)


def _arguments(folder: Path, url: str) -> list[str]:
    (container,) = _loaded("spark.yaml")["spec"]["template"]["spec"]["containers"]
    ours = {
        "$(POD_IP)": ADDRESS,
        "$(SPARK_IMAGE)": "an/image",
        "https://kubernetes.default.svc": url,
        "/opt/spark/spark.properties": str(folder / "spark.properties"),
    }
    arguments = []
    for argument in container["args"]:
        if "$(POD_NAME)" not in argument:  # the driver is no pod here
            for here, there in ours.items():
                argument = argument.replace(here, there)  # noqa: PLW2901
            arguments.append(argument)
    return arguments


def _says(log: Path, words: str, process: subprocess.Popen[bytes] | None = None) -> bool:
    text = log.read_text(errors="replace")
    assert process is None or process.poll() is None, text[-3000:]
    return words in text
