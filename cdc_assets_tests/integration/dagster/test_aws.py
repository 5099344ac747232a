"""A component reads secrets by the user's SecretsManagerResource, and files by their S3Resource."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import dagster as dg
import pytest
import yaml
from dagster_aws.s3 import S3Resource
from moto.server import ThreadedMotoServer
from psycopg.conninfo import conninfo_to_dict

from cdc_assets.config.reading import expansion
from cdc_assets.config.source import SourceConfig, config_from_parent
from cdc_assets.dagster.resources import aws
from cdc_assets.dagster.resources.sources import configuration
from cdc_assets.errors import ConfigurationError
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support.lake import NewLake
from cdc_assets_tests.support.s3 import KEYS, ObjectStore
from cdc_assets_tests.support.sigv4 import Key

PASSWORD = "p@ss/w:rd ${HOME}"
STORE = Key("ours", "s3cret${HOME}")
VARIABLES = """
import dagster as dg
from dagster_aws.s3 import S3Resource
from dagster_aws.secretsmanager import SecretsManagerResource


@dg.template_var
def secretsmanager():
    return SecretsManagerResource(region_name=dg.EnvVar("OUR_REGION"), endpoint_url="{manager}")


@dg.template_var
def s3():
    return S3Resource({s3})
"""


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Secrets Manager where nobody looks who isn't told; its address."""
    server = ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    _, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL_SECRETS_MANAGER", "http://127.0.0.1:1")
    monkeypatch.setenv("OUR_REGION", "eu-central-1")
    yield f"http://127.0.0.1:{port}"
    server.stop()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, manager: str) -> Any:
    """Loads a project with one source, whose resources are as given; its configuration."""

    def load(store: str, **attributes: Any) -> SourceConfig:
        name = f"project_{tmp_path.name}"
        app = tmp_path / name / "defs" / "app"
        app.mkdir(parents=True)
        for folder in (app.parent.parent, app.parent):
            (folder / "__init__.py").touch()
        (tmp_path / name / "aws.py").write_text(VARIABLES.format(manager=manager, s3=store))
        source = {
            "type": "cdc_assets.PostgresSource",
            "template_vars_module": f"{name}.aws",
            "attributes": {"name": "app", "tables": [{"name": "t"}], **attributes},
        }
        (app / "defs.yaml").write_text(yaml.safe_dump(source))
        monkeypatch.syspath_prepend(tmp_path)
        defs = importlib.import_module(f"{name}.defs")
        tree = dg.ComponentTree.from_module(defs_module=defs, project_root=tmp_path)
        tree.build_defs(app)
        return configuration("app")

    return load


def test_secrets_are_read_by_the_users_resource(
    project: Any, manager: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(region: str, name: str, password: str) -> str:
        client = boto3.client("secretsmanager", region_name=region, endpoint_url=manager)
        secret = json.dumps({"user": "cdc", "password": password})
        return str(client.create_secret(Name=name, SecretString=secret)["ARN"])

    put("eu-central-1", "given", PASSWORD)
    other = put("us-west-2", "other", "elsewhere")
    dsn = "postgresql://${aws-secret:given#user}:${aws-secret:%s#password}@db/shop"
    config = project(
        "",
        postgres={"dsn": dsn % "given"},
        state={"postgres_url": dsn % other},  # of another region, by its ARN
    )
    for given, password in (
        (config.postgres.dsn, PASSWORD),
        (config.state.postgres_url, "elsewhere"),
    ):
        found = conninfo_to_dict(given.get_secret_value())
        assert (found["user"], found["password"]) == ("cdc", password)
    expansion._text.cache_clear()
    assert config_from_parent(config.dump()) == config


@pytest.mark.spark
def test_files_are_reached_by_the_users_resource(
    project: Any, s3: ObjectStore, copied_lake: NewLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole pipeline by a key that no environment has, and that came from a parent."""
    s3.keys = {STORE.id: STORE}
    for name in KEYS:  # Spark was started with them: they are of no use to it
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    config = project(
        f'endpoint_url="{s3.settings["endpoint"]}", region_name="us-east-1", use_ssl=False,'
        f' aws_access_key_id="{STORE.id}", aws_secret_access_key="{STORE.secret}"',
        postgres={"dsn": "postgresql://db/shop"},
        s3={"path_style": True},
    )
    assert STORE.secret not in repr(config)
    handed = json.loads(config_from_parent(config.dump()).dump())["s3"]
    handed["secret_access_key"] = handed["secret_access_key"].replace("${", "$${")
    settings = {
        "s3": handed,
        "staging": {"uri": "s3://bucket/staging"},
        "lake": {"catalog": {"warehouse": "s3://bucket/warehouse"}},
    }
    setup = "create table t (id int primary key, v text); insert into t values (1, 'a'), (2, 'b')"
    with copied_lake(setup, "t", **settings) as source:
        source.execute("update t set v = 'c' where id = 1; insert into t values (3, 'd')")
        source.catch_up()
        assert [one.equal for one in source.verify()] == [True]
        assert source.row(TableId("public", "t")).state == "streaming"
    assert s3.refused == {}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"profile_name": "prod"}, "profile_name.*AWS_PROFILE"),
        ({"use_unsigned_session": True}, "use_unsigned_session.*Leave it out"),
        ({"verify": False}, "verify.*Leave"),
        ({"use_ssl": False, "endpoint_url": "https://store"}, "use_ssl.*Leave"),
    ],
)
def test_what_the_files_clients_do_not_have_is_refused(settings: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        aws.given({"s3": S3Resource(**settings)}, "defs.yaml")


def test_of_two_resources_none_is_guessed() -> None:
    scope = {"one": S3Resource(), "env": "text", "two": S3Resource()}
    with pytest.raises(ConfigurationError, match="one and two are both S3Resource"):
        aws.given(scope, "defs.yaml")


def test_the_configurations_own_settings_come_first(project: Any) -> None:
    config = project(
        'region_name="eu-west-1", aws_access_key_id="theirs", aws_secret_access_key="x",'
        ' aws_session_token="y"',
        postgres={"dsn": "postgresql://db/shop"},
        s3={"access_key_id": "own", "secret_access_key": "z"},
    )
    assert config.s3.region == "eu-west-1"
    assert config.s3.key == {"s3.access-key-id": "own", "s3.secret-access-key": "z"}
