"""Promise 8, its other half: links to other hosts that aren't verified are findings of check."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.errors import ConfigurationError
from cdc_assets.readiness.links import transport_findings
from cdc_assets.readiness.surroundings import review
from cdc_assets_tests.security.transport import (
    no_variables,  # noqa: F401 - a fixture for every test
    source,
)

ELSEWHERE = "host=db.example user=u dbname=app"


def codes(dsn: str, **more: object) -> list[str]:
    found = list(transport_findings(source(dsn, **more)))
    assert {f.severity for f in found} <= {"warning"}
    assert all(f.remedy and "planted" not in f.message for f in found)
    return [f.code for f in found]


def test_an_unverified_database_on_another_host_is_a_finding() -> None:
    for mode in ("", "sslmode=disable", "sslmode=prefer", "sslmode=require"):
        assert codes(f"{ELSEWHERE} {mode}") == ["transport_postgres"], mode
    for mode in ("sslmode=verify-ca", "sslmode=verify-full", "sslrootcert=system"):
        assert codes(f"{ELSEWHERE} {mode}") == [], mode
    for host in ("localhost", "127.0.0.1", "::1", "127.8.8.8"):
        assert codes(f"host={host} dbname=app") == [], host
    assert codes("host=localhost,db.example dbname=app") == ["transport_postgres"]
    assert codes("host=db.example hostaddr=127.0.0.1", lake=REST) == []
    state = {"postgres_url": "host=state.example dbname=s"}
    lake = {"catalog": {"uri": "postgresql+psycopg://u:planted@catalog.example/c"}}
    assert codes("host=localhost", state=state, lake=lake) == ["transport_postgres"] * 2


REST = {"catalog": {"type": "rest", "uri": "https://catalog.example"}}
HOOK = "http://hooks.example/planted"


@pytest.mark.parametrize(
    ("bad", "good", "code"),
    [
        (
            {"spark": {"remote": "sc://spark.example:15002"}},
            {"spark": {"remote": "sc://spark.example:443/;use_ssl=true"}},
            "transport_spark",
        ),
        (
            {"spark": {"remote": "sc://spark.example"}},
            {"spark": {"remote": "sc://127.0.0.1:15002"}},
            "transport_spark",
        ),
        (
            {"lake": {"catalog": {"type": "rest", "uri": "http://u:planted@catalog.example"}}},
            {"lake": REST},
            "transport_catalog",
        ),
        (
            {"staging": {"uri": "s3://b/s"}, "s3": {"endpoint": "http://store.example:9000"}},
            {"staging": {"uri": "s3://b/s"}, "s3": {"endpoint": "https://store.example"}},
            "transport_s3",
        ),
        (
            {"alerts": {"sinks": [{"type": "webhook", "url": HOOK}]}},
            {"alerts": {"sinks": [{"type": "webhook", "url": HOOK.replace("p:", "ps:")}]}},
            "transport_alerts",
        ),
    ],
)
def test_other_plain_links_to_other_hosts_are_findings(
    bad: dict[str, object], good: dict[str, object], code: str
) -> None:
    assert codes("host=localhost dbname=app", **bad) == [code]
    assert codes("host=localhost dbname=app", **good) == []


def test_plain_mail_to_another_host_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    mail = {"type": "mail", "host": "smtp.example", "from": "a@example.com", "to": ["b@c.de"]}
    for security, expected in (("none", ["transport_alerts"]), ("starttls", [])):
        sinks = [{**mail, "security": security}]
        assert codes("host=localhost dbname=app", alerts={"sinks": sinks}) == expected
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://store.example")
    assert codes("host=localhost", staging={"uri": "s3://b/s"}) == ["transport_s3"]


def test_check_shows_the_findings_and_a_local_source_has_none(
    postgres: EmbeddedPostgres, tmp_home: Path
) -> None:
    dsn = postgres.start()
    config = source(dsn, spark={"remote": "sc://127.0.0.2:1"})
    assert [f for f in review(config) if f.code.startswith("transport")] == []


def test_an_address_that_nobody_can_read_leaves_check_alone() -> None:
    with pytest.raises(ConfigurationError, match="write sc://host:15002"):
        source("host=localhost", spark={"remote": "sc://h/path"})
    hook = {"type": "webhook", "url": "http://[planted"}
    assert codes("host=localhost", alerts={"sinks": [hook]}) == []


def test_what_streams_is_looked_at_too() -> None:
    both = {"dsn": f"{ELSEWHERE} sslmode=verify-full", "replication_dsn": ELSEWHERE}
    assert codes("", postgres=both) == ["transport_postgres"]
