"""Values of the configuration from AWS Secrets Manager, as a server on loopback speaks it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer
from psycopg.conninfo import conninfo_to_dict

from cdc_assets.config.reading import expansion
from cdc_assets.config.source import config_from_parent, parse_config
from cdc_assets.errors import ConfigurationError

PASSWORD = "p@ss/w:rd #1?${HOME}"


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    server = ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    _, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL_SECRETS_MANAGER", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    expansion._text.cache_clear()
    yield boto3.client("secretsmanager", region_name="eu-central-1")
    expansion._text.cache_clear()
    server.stop()


def settings(dsn: str, **more: object) -> dict[str, object]:
    return {"name": "src", "postgres": {"dsn": dsn}, "tables": [{"name": "t"}], **more}


def test_references_are_replaced(manager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rds = {"username": "cdc", "password": PASSWORD, "port": 5433}
    arn = manager.create_secret(Name="rds/shop", SecretString=json.dumps(rds))["ARN"]
    manager.create_secret(Name="webhook", SecretString="https://hooks.example/T0/B0")
    dsn = (
        f"postgresql://${{aws-secret:rds/shop#username}}:${{aws-secret:{arn}#password}}"
        "@db:${aws-secret:rds/shop#port}/shop"
    )
    sinks = [{"type": "webhook", "url": "${aws-secret:webhook}"}]
    config = parse_config(settings(dsn, alerts={"sinks": sinks}), "test")
    assert config.postgres.dsn is not None
    parts = conninfo_to_dict(config.postgres.dsn.get_secret_value())
    assert (parts["user"], parts["password"], parts["port"]) == ("cdc", PASSWORD, "5433")
    [sink] = config.alerts.sinks
    assert "hooks.example" in sink.url.get_secret_value()  # type: ignore[union-attr]
    # A child gets it as it is, whatever it looks like, and asks nobody.
    words = "host=db user=cdc password='${aws-secret:rds/shop#password}'"
    config = parse_config(settings(words), "test")
    line = config.dump()
    monkeypatch.setenv("AWS_ENDPOINT_URL_SECRETS_MANAGER", "http://127.0.0.1:1")
    expansion._text.cache_clear()
    handed = config_from_parent(line)
    assert handed == config
    assert handed.postgres.dsn is not None
    assert conninfo_to_dict(handed.postgres.dsn.get_secret_value())["password"] == PASSWORD


def test_what_cannot_be_read_is_named_without_a_word_of_it(
    manager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager.create_secret(Name="rds", SecretString=json.dumps({"password": PASSWORD}))
    manager.create_secret(Name="plain", SecretString=PASSWORD)
    for reference, why in (
        ("gone", "gone can't be read (ResourceNotFoundException); create it"),
        ("rds#user", "rds has no member 'user'"),
        ("plain#password", "plain has no member 'password'"),
    ):
        with pytest.raises(ConfigurationError) as caught:
            parse_config(settings(f"postgresql://${{aws-secret:{reference}}}@db/shop"), "test")
        assert why in str(caught.value)
        assert "p@ss" not in str(caught.value)
    monkeypatch.setenv("AWS_ENDPOINT_URL_SECRETS_MANAGER", "http://127.0.0.1:1")
    expansion._text.cache_clear()
    with pytest.raises(ConfigurationError, match="can't be asked for rds"):
        parse_config(settings("${aws-secret:rds}"), "test")


@pytest.mark.parametrize(
    "dsn", ["postgresql://u:p/planted@db/shop", "host=db planted", "postgresql://[planted/db"]
)
def test_an_address_that_libpq_does_not_read_is_not_repeated(dsn: str) -> None:
    for place in (
        {"postgres": {"dsn": dsn}},
        {"state": {"postgres_url": dsn}},
        {"lake": {"catalog": {"type": "sql", "uri": dsn}}},
    ):
        with pytest.raises(ConfigurationError, match="not an address that libpq reads") as caught:
            parse_config({**settings("postgresql://db/shop"), **place}, "test")
        assert "planted" not in str(caught.value)
