"""The manifests for Kubernetes: its own client's models take them, and what they name is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from dagster._config import validate_config
from dagster_k8s import K8sRunLauncher

from cdc_assets.cli.main import cli
from cdc_assets.config.source import load_config
from cdc_assets_tests.infra.test_files import DOCKER, INFRA, SECRETS
from cdc_assets_tests.support.manifests import (
    FOLDER,
    is_of,
    known,
    kustomization,
    manifests,
    named,
    policies_name_pods,
)

# Secrets of compose, by what has them in the cluster.
DATABASES, DAGSTER, SPARK = "databases", "dagster", "spark"
NEEDS = {
    "code": {DATABASES, DAGSTER, "keys-both"},
    "flusher-app": {DATABASES, "keys-lake"},
    "spark": {SPARK, "keys-lake"},
    "webserver": {DAGSTER, "keys-logs"},
    "daemon": {DAGSTER, "keys-logs"},
    "runs": {DATABASES, DAGSTER, "keys-both"},
}


def _pods() -> dict[str, dict[str, Any]]:
    """The template of each Deployment's pods."""
    return {name: found["spec"]["template"] for name, found in named("Deployment").items()}


def _launcher() -> dict[str, Any]:
    settings = yaml.safe_load((FOLDER / "dagster" / "dagster.yaml").read_text())
    found = settings["run_launcher"]["config"]
    assert isinstance(found, dict)
    return found


def test_kubernetes_knows_each_field() -> None:
    for manifest in manifests():
        known(manifest)


def test_a_field_that_kubernetes_does_not_know_is_found() -> None:
    manifest = next(manifests("Deployment"))
    manifest["spec"]["template"]["spec"]["containers"][0]["memory"] = "1Gi"
    with pytest.raises(Exception, match="memory"):
        known(manifest)


def test_each_file_is_applied() -> None:
    applies = kustomization()
    applied = {*applies["resources"], "kustomization.yaml"}
    maps = {made["name"]: made["files"] for made in applies["configMapGenerator"]}
    applied |= {file for files in maps.values() for file in files}
    there = {file.relative_to(FOLDER) for file in FOLDER.rglob("*.yaml")}
    assert applied == {str(file) for file in there if file.parts[0] != "executors"}
    for pod in _pods().values():
        for volume in pod["spec"].get("volumes", ()):
            assert "emptyDir" in volume or volume["configMap"]["name"] in maps
        (container,) = pod["spec"]["containers"]
        assert container["image"] in {image["name"] for image in applies["images"]}
        for mount in container["volumeMounts"]:
            assert mount["name"] in {volume["name"] for volume in pod["spec"]["volumes"]}


def test_the_launcher_is_configured_as_it_asks_for() -> None:
    schema = K8sRunLauncher.config_type()  # type: ignore[no-untyped-call]
    found = validate_config(schema, _launcher())
    assert found.success, found.errors
    launcher = _launcher()
    assert launcher["service_account_name"] in named("ServiceAccount")
    assert launcher["job_namespace"] == kustomization()["namespace"]
    assert launcher["instance_config_map"] in {
        made["name"] for made in kustomization()["configMapGenerator"]
    }
    code = _pods()["code"]["spec"]
    mounts = [m for m in code["containers"][0]["volumeMounts"] if m["name"] == "sources"]
    assert launcher["volume_mounts"] == mounts  # a run loads the sources as its code server did
    assert [v for v in code["volumes"] if v["name"] == "sources"] == launcher["volumes"]


def test_the_instance_differs_from_the_other_production_instance_by_its_launcher() -> None:
    theirs, ours = (
        yaml.safe_load((folder / "dagster" / "dagster.yaml").read_text())
        for folder in (INFRA, FOLDER)
    )
    assert ours.pop("run_launcher") != theirs.pop("run_launcher")
    assert ours == theirs


def test_services_and_policies_name_pods_that_are_there() -> None:
    pods = {name: pod["metadata"]["labels"] for name, pod in _pods().items()}
    pods["runs"] = _launcher()["labels"]
    for name, service in named("Service").items():
        (pod,) = [p for p, labels in pods.items() if is_of(service["spec"]["selector"], labels)]
        (container,) = _pods()[pod]["spec"]["containers"]
        (port,) = service["spec"]["ports"]
        has = {p["name"]: p["containerPort"] for p in container["ports"]}
        assert port["port"] == has[port["name"]], name
    policies_name_pods(named("NetworkPolicy"), pods)
    for name, deployment in named("Deployment").items():
        assert is_of(deployment["spec"]["selector"]["matchLabels"], pods[name])


def test_addresses_and_probes_lead_somewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    services = named("Service")
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    config = load_config(FOLDER / "sources" / "app.yaml")
    remote = re.match(r"sc://(\w+):(\d+)/", config.spark.remote or "")
    assert remote is not None
    assert services[remote[1]]["spec"]["ports"][0]["port"] == int(remote[2])
    workspace = (FOLDER / "dagster" / "workspace.yaml").read_text()
    assert workspace == (DOCKER / "workspace.yaml").read_text()
    [location] = yaml.safe_load(workspace)["load_from"]
    code = services[location["grpc_server"]["host"]]
    assert code["spec"]["ports"][0]["port"] == location["grpc_server"]["port"]
    (flusher,) = _pods()["flusher-app"]["spec"]["containers"]
    assert flusher["ports"] == [{"name": "metrics", "containerPort": config.metrics.port}]
    assert config.metrics.host == "0.0.0.0"  # probes ask the pod's address
    probed = [flusher[probe]["httpGet"]["path"] for probe in ("livenessProbe", "readinessProbe")]
    assert probed == ["/live", "/ready"]
    *_, source, command = flusher["command"]
    assert Path(source).name == "app.yaml"
    assert command in cli.list_commands(click.Context(cli))


def test_each_pod_has_the_secrets_that_it_needs_and_no_other() -> None:
    has = dict[str, set[str]]()
    for name, pod in _pods().items():
        (container,) = pod["spec"]["containers"]
        has[name] = {source["secretRef"]["name"] for source in container["envFrom"]}
        assert not [e for e in container.get("env", ()) if "valueFrom" in e]
    launcher = _launcher()
    more = launcher["run_k8s_config"]["container_config"]["env_from"]
    has["runs"] = {*launcher["env_secrets"], *(source["secret_ref"]["name"] for source in more)}
    assert has == NEEDS
    readme = (INFRA / "README.md").read_text()
    assert all(f"| `{secret}` |" in readme for secret in set().union(*NEEDS.values()))


def test_only_what_starts_runs_may_ask_the_cluster() -> None:
    asking = {name for name, pod in _pods().items() if pod["spec"]["serviceAccountName"] != "data"}
    assert asking == {"webserver", "daemon"}
    assert named("ServiceAccount")["data"]["automountServiceAccountToken"] is False
    (binding,) = manifests("RoleBinding")
    assert [subject["name"] for subject in binding["subjects"]] == ["dagster"]
