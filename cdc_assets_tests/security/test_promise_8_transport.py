"""Promise 8: transport is what the DSN says on all three drivers, or is refused.

The drivers: libpq (psycopg), SQLAlchemy on psycopg (pyiceberg's catalog), JDBC (Spark's).
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from sqlalchemy import create_engine

from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.errors import ConfigurationError
from cdc_assets.lake.catalog.catalog import shown, sql_catalog_uri
from cdc_assets.lake.spark.jars import JARS, cache_folder, provide
from cdc_assets.postgres.copy_out.session import open_session
from cdc_assets.postgres.session.connect import connect, uri
from cdc_assets.postgres.session.jdbc import HARMLESS, PLACE, REFUSED, SAME, TLS, VALUES, jdbc
from cdc_assets.postgres.session.parameters import KNOWN, resolved, verified
from cdc_assets.readiness.surroundings import admitted, review
from cdc_assets_tests.security.transport import (
    no_variables,  # noqa: F401 - a fixture for every test
    source,
)
from cdc_assets_tests.support.tls import Authority

DECIDED = {*SAME, *PLACE, *TLS, *HARMLESS, *REFUSED}
BASE = {"host": "db.example", "user": "cdc", "password": "p", "dbname": "app"}


# -- every parameter is decided


def test_every_parameter_that_libpq_knows_is_decided() -> None:
    assert set() == KNOWN - DECIDED, "a new libpq's parameters: decide them in session/jdbc.py"
    assert VALUES.keys() <= REFUSED.keys()
    ways = [*SAME, *PLACE, *TLS, *HARMLESS, *REFUSED]
    assert len(ways) == len(set(ways))


def test_a_parameter_that_nobody_decided_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="require_quantum can't be had"):
        jdbc({**BASE, "require_quantum": "1"})


@pytest.mark.parametrize("key", sorted(KNOWN))
def test_a_parameter_is_carried_along_or_refused_by_its_name(key: str) -> None:
    value = {"sslmode": "verify-full", "sslkey": "k.pk8", "port": "7"}.get(key, "demanded")
    others = {k: v for k, v in BASE.items() if k not in (key, "password")}
    if key in REFUSED:
        with pytest.raises(ConfigurationError, match=f"^{key} can't be had") as caught:
            jdbc({**others, key: value})
        assert REFUSED[key] in caught.value.what
        assert "lake.catalog.uri" in caught.value.remedy
    else:
        assert (jdbc({**others, key: value}) == jdbc(others)) == (key in HARMLESS)


def test_what_a_value_demands_is_carried_along() -> None:
    wanted = {
        "channel_binding=require": ("channelBinding", "require"),
        "require_auth=scram-sha-256": ("requireAuth", "scram-sha-256"),
        "require_auth=oauth": None,
        "sslnegotiation=direct": ("sslNegotiation", "direct"),
        "gssencmode=require": ("gssEncMode", "require"),
        "krbsrvname=pg": ("kerberosServerName", "pg"),
        "target_session_attrs=read-write": ("targetServerType", "primary"),
        "target_session_attrs=standby": None,
        "ssl_min_protocol_version=TLSv1.3": None,
        "sslrootcert=system": ("sslmode", "verify-full"),
        "sslcrl=/revoked.pem": None,
        "hostaddr=10.0.0.1": None,
        "service=app": None,
        "sslcertmode=disable": None,
        "options='-c role=x'": ("options", "-c role=x"),
    }
    for given, carried in wanted.items():
        params = conninfo_to_dict(f"host=db {given}")
        demanded = {k: str(v) for k, v in params.items()}
        if carried is None:
            with pytest.raises(ConfigurationError):
                jdbc(demanded)
        else:
            key, value = carried
            assert jdbc(demanded)[1][key] == value


def test_hosts_and_names_stay_what_they_are() -> None:
    many = jdbc({**BASE, "host": "a,b", "port": "1,2"})
    assert many[0] == "jdbc:postgresql://a:1,b:2/app"
    assert jdbc({**BASE, "host": "::1"})[0] == "jdbc:postgresql://[::1]:5432/app"
    planted = jdbc({**BASE, "dbname": "app?sslmode=disable"})
    assert planted[0] == "jdbc:postgresql://db.example:5432/app%3Fsslmode%3Ddisable"
    for host in ("/run/postgresql", "a,/run/postgresql", "db/?sslmode=disable#"):
        with pytest.raises(ConfigurationError):
            jdbc({**BASE, "host": host})


def test_variables_of_the_environment_hold_for_all_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    dsn = "host=db.example user=cdc password=p dbname=app"
    monkeypatch.setenv("PGSSLMODE", "verify-full")
    monkeypatch.setenv("PGCHANNELBINDING", "require")
    assert jdbc(resolved(dsn))[1]["sslmode"] == "verify-full"
    assert jdbc(resolved(dsn))[1]["channelBinding"] == "require"
    assert "sslmode=verify-full" in uri(dsn, "x")  # read in a Spark task, maybe elsewhere
    assert verified(resolved(dsn))
    assert jdbc(resolved(dsn + " sslmode=disable"))[1]["sslmode"] == "disable"  # the DSN wins
    monkeypatch.setenv("PGSSLCRL", "/revoked.pem")
    with pytest.raises(ConfigurationError, match="sslcrl can't be had"):
        jdbc(resolved(dsn))


def test_no_secret_of_a_dsn_is_shown() -> None:
    dsn = "host=h dbname=d password=planted sslpassword=planted scram_client_key=planted"
    catalog = {"lake": {"catalog": {"uri": dsn}}}
    assert "planted" not in str(shown(source("host=h", **catalog)))


# -- real servers, real drivers


def test_a_service_comes_before_variables_of_the_environment(
    postgres: EmbeddedPostgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = conninfo_to_dict(postgres.start())
    lines = [f"{key}={value}" for key, value in given.items()]
    (tmp_path / "services").write_text("\n".join(["[shop]", *lines]))
    monkeypatch.setenv("PGSERVICEFILE", str(tmp_path / "services"))
    monkeypatch.setenv("PGUSER", "nobody")
    monkeypatch.setenv("PGDATABASE", "nowhere")
    for dsn in ("service=shop", "service=shop dbname=template1"):
        # As libpq has it, whoever is given the address.
        for address in (dsn, uri(dsn, "x"), make_conninfo("", **resolved(dsn))):
            with psycopg.connect(address) as connection:
                at = (connection.info.user, connection.info.dbname)
                assert at == (given["user"], conninfo_to_dict(dsn).get("dbname", given["dbname"]))


def by_jdbc(*dsns: str) -> list[str]:
    """What the driver itself says to each: connected, or refused."""
    [driver] = provide(cache_folder(), {}, print, [JARS[2]])
    lines = []
    for dsn in dsns:
        address, properties = jdbc(resolved(dsn))
        lines.append("\t".join([address, *(f"{k}={quote(v)}" for k, v in properties.items())]))
    program = Path(__file__).with_name("Connects.java")
    done = subprocess.run(
        ["java", "-cp", str(driver), str(program)],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout.splitlines()


def _libpq(dsn: str) -> None:
    connect(dsn).close()


def _copy(dsn: str) -> None:
    open_session(uri(dsn, "test")).close()


def _sqlalchemy(dsn: str) -> None:
    catalog = {"type": "sql", "uri": dsn}
    address = sql_catalog_uri(source(dsn, lake={"catalog": catalog}))
    engine = create_engine(address.render_as_string(hide_password=False))
    try:
        engine.connect().close()
    finally:
        engine.dispose()


def refusals(dsn: str) -> list[str]:
    """The drivers that don't connect by a DSN; JDBC is asked apart."""
    found = []
    drivers: dict[str, Callable[[str], None]] = {
        "libpq": _libpq,
        "copy": _copy,
        "sqlalchemy": _sqlalchemy,
    }
    for name, tried in drivers.items():
        try:
            tried(dsn)
        except Exception:  # noqa: BLE001 - each driver has errors of its own
            found.append(name)
    return found


def test_all_drivers_connect_or_refuse_alike(
    secured: str, authority: Authority, public_directory: Path
) -> None:
    stranger = Authority(public_directory / "stranger-8")
    password = {
        k: v for k, v in conninfo_to_dict(secured).items() if k not in ("sslcert", "sslkey")
    }
    plain = make_conninfo("", **{**password, "host": "127.0.0.1", "user": "plain"})
    with connect(secured) as made:
        made.execute("create role plain login password 'p'")
        hba = made.execute("show hba_file").fetchone()
        assert hba is not None
        with Path(hba[0]).open("a") as rules:
            rules.write("host all plain 127.0.0.1/32 password\n")
        made.execute("select pg_reload_conf()")
    lets_in = [
        secured,
        make_conninfo(secured, channel_binding="require", require_auth="scram-sha-256"),
        make_conninfo(secured, ssl_min_protocol_version="TLSv1.2", target_session_attrs="primary"),
        make_conninfo(secured, host="nowhere.invalid,localhost", connect_timeout="5"),
        make_conninfo(plain, sslmode="disable"),
    ]
    keeps_out = [
        make_conninfo(secured, require_auth="md5"),
        make_conninfo(secured, require_auth="!scram-sha-256"),
        make_conninfo(secured, sslrootcert=str(stranger.root)),
        # libpq verifies by a root certificate that is there.
        make_conninfo(secured, sslmode="require", sslrootcert=str(stranger.root)),
        make_conninfo(secured, host="127.0.0.1"),  # verify-full: it isn't in the certificate
        make_conninfo(plain, sslmode="disable", channel_binding="require"),
        make_conninfo(plain, sslmode="disable", require_auth="scram-sha-256"),  # a plain password
    ]
    for dsn in lets_in:
        assert refusals(dsn) == []
    for dsn in keeps_out:
        assert refusals(dsn) == ["libpq", "copy", "sqlalchemy"]
    said = by_jdbc(*lets_in, *keeps_out)
    assert len(said) == len(lets_in) + len(keeps_out)
    assert [line.split(":")[0] for line in said] == ["connected"] * len(lets_in) + [
        "refused"
    ] * len(keeps_out), said


def test_sqlalchemy_has_every_parameter_of_the_dsn(secured: str) -> None:
    given = {"channel_binding": "require", "keepalives_idle": "17", "application_name": "mine"}
    dsn = make_conninfo(secured, **given)
    engine = create_engine(
        sql_catalog_uri(source(dsn, lake={"catalog": {"uri": dsn}})).render_as_string(
            hide_password=False
        )
    )
    with engine.connect() as made:
        session = made.connection.driver_connection
        assert session is not None
        has = session.info.get_parameters()
    engine.dispose()
    wanted = {k: v for k, v in conninfo_to_dict(dsn).items() if k != "password"}
    assert {k: has.get(k) for k in wanted} == wanted


def test_what_jdbc_lacks_is_an_error_of_check_and_no_session_opens(
    secured: str, tmp_home: Path
) -> None:
    config = source(make_conninfo(secured, sslcrldir="/revoked"))
    found = [f for f in review(config) if f.code == "transport_jdbc"]
    assert [f.severity for f in found] == ["error"]
    assert "sslcrldir" in found[0].message
    with pytest.raises(Exception, match="transport_jdbc: sslcrldir"):
        admitted(config, lambda: pytest.fail("a session was opened"))
