"""The manifests of ``infra/kubernetes``, and what can be asked of any of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import kubernetes.client
import yaml
from dagster_k8s.models import k8s_model_from_dict, k8s_snake_case_dict

FOLDER = Path(__file__).parents[2] / "infra" / "kubernetes"
_GROUPS = ("", "apps", "rbac.authorization.k8s.io", "networking.k8s.io")


def kustomization(folder: Path = FOLDER) -> dict[str, Any]:
    found = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert isinstance(found, dict)
    return found


def manifests(kind: str | None = None, folder: Path = FOLDER) -> Iterator[dict[str, Any]]:
    for file in kustomization(folder)["resources"]:
        for manifest in yaml.safe_load_all((folder / file).read_text()):
            if kind in (None, manifest["kind"]):
                yield manifest


def named(kind: str, folder: Path = FOLDER) -> dict[str, dict[str, Any]]:
    return {manifest["metadata"]["name"]: manifest for manifest in manifests(kind, folder)}


def known(manifest: dict[str, Any]) -> None:
    """Raises what Kubernetes' client does of a field that it doesn't know, or lacks."""
    group, _, version = manifest["apiVersion"].rpartition("/")
    assert group in _GROUPS
    model = getattr(kubernetes.client, f"{version.capitalize()}{manifest['kind']}")
    k8s_model_from_dict(model, k8s_snake_case_dict(model, manifest))


def is_of(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return selector.items() <= labels.items()


def policies_name_pods(
    policies: Mapping[str, dict[str, Any]], pods: Mapping[str, Mapping[str, str]]
) -> None:
    """Each selects some pod, by these labels of all, and lets some in, if any."""
    for name, policy in policies.items():
        spec = policy["spec"]
        selectors = [spec["podSelector"]]
        for rule in spec.get("ingress", ()):
            selectors += [peer["podSelector"] for peer in rule["from"] if "podSelector" in peer]
        for selector in selectors:
            labels = selector.get("matchLabels", {})
            assert any(is_of(labels, pod) for pod in pods.values()), name
