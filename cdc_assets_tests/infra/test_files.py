"""Containers, Spark's settings and Terraform: what they name is there, and equals what we use."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import click
import dagster as dg
import hcl2
import pytest
import yaml
from pyspark.sql.connect.client import DefaultChannelBuilder

from cdc_assets.cli.main import cli
from cdc_assets.config.source import load_config
from cdc_assets.lake.spark.jars import JARS
from cdc_assets.lake.spark.properties import SparkServerSettings, spark_properties
from cdc_assets.process.home import private_folder

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra"
DOCKER = INFRA / "docker"
SECRETS = {
    "APP_DSN": "postgresql://u:p@h/app",
    "APP_REPLICATION_DSN": "postgresql://u:p@h/app",
    "STATE_DSN": "postgresql://u:p@h/state",
    "SPARK_TOKEN": "t0ken",
}
# What differs where the server is reached from other machines.
ADDRESS = re.compile(r"spark\.(master|driver|connect\.grpc\.binding|app\.name|jars|sql\.warehouse)")
# A Connect server of its own asks no other one.
PYTHON = "spark.sql.execution.pyspark.python"
# A file, which is elsewhere in an image or a bucket.
TURNS = "spark.scheduler.allocation.file"
TOKEN = "spark.connect.authenticate.token"


def _compose() -> dict[str, Any]:
    found = yaml.safe_load((DOCKER / "docker-compose.yml").read_text())
    assert isinstance(found, dict)
    return found


def _variables(value: object) -> set[str]:
    return set(re.findall(r"\$\{(\w+)", yaml.safe_dump(value)))


def test_the_services_name_what_is_there() -> None:
    compose = _compose()
    services, volumes = compose["services"], set(compose["volumes"])
    example = (DOCKER / "example.env").read_text() + (DOCKER / "images.lock").read_text()
    assert _variables(compose) == set(re.findall(r"^(\w+)=", example, re.MULTILINE))
    for name, service in services.items():
        assert set(service.get("depends_on", ())) <= set(services), name
        for volume in service.get("volumes", ()):
            place = volume.split(":")[0]
            assert (DOCKER / place).exists() if place.startswith(".") else place in volumes, volume
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), f"{name} listens for everybody"
        if "build" in service:
            assert f"AS {service['build']['target']}\n" in (DOCKER / "Dockerfile").read_text()


def test_the_containers_commands_exist() -> None:
    for name, service in _compose()["services"].items():
        words = service.get("command", [])
        if words and words[0] == "cdc-assets":
            assert words[-1] in cli.list_commands(click.Context(cli)), name
            assert (DOCKER / "sources" / Path(words[2]).name).exists()


def test_what_the_image_copies_is_there() -> None:
    for line in (DOCKER / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY") and "--from" not in line:
            words = shlex.split(line)
            for place in [w for w in words[1:-1] if not w.startswith("--")]:
                assert (ROOT / place).exists(), place


def test_the_images_home_is_its_users_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (made,) = re.findall(r"install .* /var/lib/cdc_assets\b", (DOCKER / "Dockerfile").read_text())
    home = tmp_path / "home"
    command = made.replace("--owner=cdc ", "").replace("/var/lib/cdc_assets", str(home))
    subprocess.run(command.split(), check=True)
    private_folder(home)
    assert caplog.messages == []


def test_the_containers_definitions_load(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    config = load_config(DOCKER / "sources" / "app.yaml")
    services = _compose()["services"]
    assert (config.s3.endpoint or "").split("/")[2].split(":")[0] in services
    assert (config.spark.remote or "").split("/")[2].split(":")[0] in services
    spec = importlib.util.spec_from_file_location("definitions", DOCKER / "definitions.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert isinstance(module.defs, dg.Definitions)
    assert dg.AssetKey(["app", "orders"]) in module.defs.resolve_all_asset_keys()
    [location] = yaml.safe_load((DOCKER / "workspace.yaml").read_text())["load_from"]
    assert location["grpc_server"]["host"] in services


def test_spark_has_the_settings_of_our_own_server(tmp_path: Path) -> None:
    lines = [
        line.split(maxsplit=1)
        for line in (DOCKER / "spark.properties").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    theirs = {key: value.strip() for key, value in lines}
    ours = spark_properties(SparkServerSettings(), tmp_path, "t0ken")
    assert theirs[PYTHON] == "/opt/venv/bin/python"
    places = [f"file:///opt/spark/jars/{jar.name}" for jar in JARS]
    assert theirs["spark.jars"].split(",") == places
    for key, value in ours.items():
        # A plugin would start a second server; the UI and the log are a matter of taste.
        apart = {"spark.plugins", "spark.ui.enabled", TURNS, TOKEN}
        if not ADDRESS.match(key) and key not in apart:
            assert theirs.get(key) == value, key
    dockerfile = (DOCKER / "Dockerfile").read_text()
    pattern = r"^COPY .* cdc_assets/lake/spark/fairscheduler\.xml (\S+)$"
    copied = re.search(pattern, dockerfile, re.MULTILINE)
    assert copied
    assert theirs[TURNS] == f"file://{copied[1]}fairscheduler.xml"


def test_the_containers_spark_asks_for_the_token_that_the_sources_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    services = _compose()["services"]
    required = "${SPARK_TOKEN:?}"
    assert services["spark"]["environment"]["SPARK_CONNECT_AUTHENTICATE_TOKEN"] == required
    # With that variable a client would want TLS of every server.
    for name in ("code", "flusher", "webserver", "daemon"):
        assert "SPARK_CONNECT_AUTHENTICATE_TOKEN" not in services[name]["environment"]
    assert "ports" not in services["spark"]
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    builder = DefaultChannelBuilder(load_config(DOCKER / "sources" / "app.yaml").spark.remote or "")
    assert builder.metadata() == [("authorization", "Bearer t0ken")]


def test_terraform_parses_and_sets_what_our_own_server_does(tmp_path: Path) -> None:
    found: dict[str, list[Any]] = {}
    for file in sorted((INFRA / "terraform").glob("*.tf")):
        for kind, blocks in hcl2.loads(file.read_text()).items():
            found.setdefault(kind, []).extend(blocks if isinstance(blocks, list) else [blocks])
    text = "\n".join(f.read_text() for f in sorted((INFRA / "terraform").glob("*.tf")))
    declared = set(re.findall(r'^variable "(\w+)"', text, re.MULTILINE))
    assert declared == set(re.findall(r"var\.(\w+)", text))
    made = set(re.findall(r'^(?:resource|data) "(\w+)" "(\w+)"', text, re.MULTILINE))
    named = re.findall(r"(?:data\.)?\b(aws_\w+)\.(\w+)\b", text)
    assert named
    assert set(named) <= made
    for jar in JARS:
        if jar.artifact != "postgresql":  # the catalog is Glue there
            assert re.search(rf'"{re.escape(jar.name)}"\s*= "{jar.sha256}"', text)
    ours = spark_properties(SparkServerSettings(), tmp_path, "t0ken")
    for key in ("spark.python.daemon.module", "spark.sql.artifact.isolation.enabled"):
        assert re.search(rf'"{re.escape(key)}"\s*= "{re.escape(ours[key])}"', text), key
    assert f'"{TURNS}"' in text
    cluster = (INFRA / "spark" / "cluster.properties").read_text()
    archived = re.search(rf"^{re.escape(PYTHON)}\s+(\S+)$", cluster, re.MULTILINE)
    assert archived
    assert re.search(rf'"{re.escape(PYTHON)}"\s*= "{re.escape(archived[1])}"', text)
    assert re.search(r'"spark.yarn.dist.archives"\s*= "\S+#cdc_assets"', text)


def test_shell_scripts_parse() -> None:
    for script in INFRA.rglob("*.sh"):
        subprocess.run(["bash", "-n", str(script)], check=True)
