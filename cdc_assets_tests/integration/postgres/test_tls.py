"""Every way in which Postgres is connected to, with certificates on both sides; and without."""

from __future__ import annotations

import threading
from pathlib import Path

import psycopg
import pytest
from click.testing import CliRunner
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cdc_assets.cli.main import cli
from cdc_assets.config.source import parse_config
from cdc_assets.errors import ConfigurationError
from cdc_assets.flusher.flusher import run
from cdc_assets.flusher.progress import Progress
from cdc_assets.lake.catalog.catalog import open_catalog, shown
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.session.connect import connect, replication_connect
from cdc_assets.postgres.session.jdbc import jdbc_key
from cdc_assets.postgres.session.tls import TlsProblem, tls_problem
from cdc_assets_tests.support.lake import lake
from cdc_assets_tests.support.tls import ROLE, Authority
from cdc_assets_tests.support.waiting import wait_for

T = TableId("public", "t")


def as_uri(dsn: str) -> str:
    """With every parameter in the query, as a person writes it."""
    params = conninfo_to_dict(dsn)
    base = f"postgresql://{params.pop('user')}:{params.pop('password')}@{params.pop('host')}"
    base += f":{params.pop('port')}/{params.pop('dbname')}"
    return f"{base}?{'&'.join(f'{key}={value}' for key, value in params.items())}"


@pytest.mark.spark
def test_everything_goes_by_certificates(
    secured: str, spark_server: SparkServer, tmp_home: Path
) -> None:
    setup = "create table t (id int primary key, v text); insert into t values (1, 'copied')"
    with lake(as_uri(secured), spark_server.ensure(), setup, "t") as source:
        source.pin()  # a replication connection and two ordinary ones
        source.copy()  # in Spark's tasks
        source.execute("insert into t values (2, 'streamed')")
        source.flush()
        source.drain_all()  # JDBC for Spark's catalog, SQLAlchemy for pyiceberg's
        assert source.rows(T) == [(1, "copied"), (2, "streamed")]
        assert [one.equal for one in source.verify()] == [True]
        plain = source.execute(
            "select application_name from pg_stat_ssl join pg_stat_activity using (pid)"
            " where usename = 'cdc' and (not ssl or client_dn is null)"
        )
        assert plain == []
        source.pins.close()
        source.execute("select pg_drop_replication_slot('cdc_src')")


def test_what_is_wrong_is_named_with_the_way_out(
    secured: str, authority: Authority, public_directory: Path, tmp_home: Path
) -> None:
    stranger = Authority(public_directory / "stranger")
    theirs = stranger.issue(ROLE)
    other = authority.issue("somebody")
    without = {k: v for k, v in conninfo_to_dict(secured).items() if k not in ("sslcert", "sslkey")}
    wrong = {
        "isn't of an authority in sslrootcert": make_conninfo(
            secured, sslrootcert=str(stranger.root)
        ),
        "is for another host name": make_conninfo(secured, host="127.0.0.1"),
        "wants a client certificate": make_conninfo("", **without),
        "doesn't accept the client certificate": make_conninfo(
            secured, sslcert=str(theirs.certificate), sslkey=str(theirs.key)
        ),
        "isn't there or can't be read": make_conninfo(secured, sslrootcert="/nowhere/root.crt"),
        "can't be used": make_conninfo(secured, sslkey="/nowhere/key.pem"),
        "doesn't let this role in without TLS": make_conninfo(
            "", **{**without, "sslmode": "disable", "host": "127.0.0.1"}
        ),
    }
    for what, dsn in wrong.items():
        for opened in (connect, replication_connect):
            with pytest.raises(TlsProblem, match=what) as caught:
                opened(dsn)
            assert caught.value.remedy
            assert isinstance(caught.value, psycopg.OperationalError)
        config = parse_config(
            {"name": "src", "postgres": {"dsn": dsn}, "tables": [{"name": "t"}]}, "test"
        )
        with pytest.raises(TlsProblem, match=what):
            run(config)  # at the start; and it ends
        with pytest.raises(TlsProblem, match=what):
            open_catalog(config)
    port = conninfo_to_dict(secured)["port"]
    several = make_conninfo(secured, host="127.0.0.1,localhost", port=f"{port},1")
    for opened in (connect, replication_connect):
        with pytest.raises(TlsProblem, match="does not match host name"):  # of the first one
            opened(several)
    with pytest.raises(psycopg.OperationalError):  # a certificate, but somebody else's
        connect(make_conninfo(secured, sslcert=str(other.certificate), sslkey=str(other.key)))


def test_commands_say_it(secured: str, tmp_home: Path) -> None:
    dsn = make_conninfo(secured, host="127.0.0.1")
    path = tmp_home / "src.json"
    config = parse_config(
        {"name": "src", "postgres": {"dsn": dsn}, "tables": [{"name": "t"}]}, "test"
    )
    path.write_text(config.dump())
    for command in ("status", "check"):
        done = CliRunner().invoke(cli, ["--config", str(path), command])
        assert done.exit_code == 1
        assert "is for another host name" in done.output
        assert "Connect by a name that is in the certificate" in done.output.replace("\n    ", " ")


def test_certificates_that_are_renewed_under_a_flusher_are_waited_for(
    secured: str, authority: Authority, tmp_home: Path, public_directory: Path
) -> None:
    """It tells what is wrong while it waits."""
    root = public_directory / "renewed.crt"
    root.write_bytes(authority.root.read_bytes())
    with psycopg.connect(secured, autocommit=True) as admin:
        admin.execute("create table if not exists t (id int primary key, v text)")
    config = parse_config(
        {
            "name": "renewed",
            "postgres": {"dsn": make_conninfo(secured, sslrootcert=str(root))},
            "tables": [{"name": "t"}],
            "snapshot": {"mode": "never"},
        },
        "test",
    )
    stop, progress = threading.Event(), Progress()
    thread = threading.Thread(
        target=run, args=(config,), kwargs={"stop": stop, "progress": progress}
    )
    thread.start()
    try:
        wait_for(lambda: progress.state == "streaming")
        root.write_bytes(Authority(public_directory / "expired").root.read_bytes())
        with psycopg.connect(secured, autocommit=True) as admin:
            admin.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where application_name like 'cdc_assets renewed%%'"
            )
            wait_for(lambda: "isn't of an authority in sslrootcert" in str(progress.last_error))
            root.write_bytes(authority.root.read_bytes())
            wait_for(lambda: progress.state == "streaming")
    finally:
        stop.set()
        thread.join(30)
        with psycopg.connect(secured, autocommit=True) as admin:
            wait_for(
                lambda: (
                    not admin.execute("select from pg_replication_slots where active").fetchall()
                )
            )
            admin.execute("select pg_drop_replication_slot(slot_name) from pg_replication_slots")


def test_a_key_that_the_jdbc_driver_would_not_read(secured: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"Name it \*\.pem"):
        jdbc_key(str(tmp_path / "client.key"))
    key = str(conninfo_to_dict(secured)["sslkey"])
    assert jdbc_key(key) == {"sslkey": key, "pemKeyAlgorithm": "EC"}


def test_the_password_of_a_key_is_not_shown(secured: str) -> None:
    dsn = make_conninfo(secured, sslpassword="planted")
    config = parse_config(
        {"name": "src", "postgres": {"dsn": dsn}, "tables": [{"name": "t"}]}, "test"
    )
    assert "planted" not in str(shown(config))
    assert "verify-full" in str(shown(config))


def test_other_errors_of_a_connection_are_none_of_tls() -> None:
    assert tls_problem('connection failed: FATAL:  database "nowhere" does not exist') is None
    assert tls_problem("connection refused") is None
