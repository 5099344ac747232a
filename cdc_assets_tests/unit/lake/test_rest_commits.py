"""What a REST catalog's server may answer to a commit that is made here, and what follows."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event
from unittest.mock import Mock

import pyarrow as pa
import pytest
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.types import IntegerType, NestedField
from requests.exceptions import ReadTimeout

from cdc_assets.lake.catalog import commits, rest_client
from cdc_assets.lake.catalog.commits import Metadata, Unknown, edited, newest
from cdc_assets.lake.catalog.rest import lends
from cdc_assets.lake.catalog.rest_client import TimedRest, rest_catalog
from cdc_assets.lake.drafts.metadata import main_of
from cdc_assets_tests.support import rest_catalog as support
from cdc_assets_tests.support.rest_catalog import Answer, Commit, RestCatalog
from cdc_assets_tests.support.sigv4 import Key
from cdc_assets_tests.support.waiting import wait_for

SCHEMA = Schema(NestedField(1, "id", IntegerType(), required=False))
ROW = pa.table({"id": pa.array([1], pa.int32())})
TABLE, HEAD = ("n", "t"), 4711


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RestCatalog]:
    folder = tmp_path_factory.mktemp("rest")
    with support.rest_catalog(folder, folder.as_uri()) as found:
        found.tables.create_namespace("n")
        yield found


@pytest.fixture
def server(running: RestCatalog, monkeypatch: pytest.MonkeyPatch) -> RestCatalog:
    """With a table that was made anew."""
    monkeypatch.setattr(commits, "_PAUSE_SECONDS", 0)
    monkeypatch.setattr(rest_client, "SECONDS", (0.3, 0.3))
    monkeypatch.setattr(running, "at_commit", lambda commit: commit())
    monkeypatch.setattr(running, "config", running.config)
    if running.tables.table_exists(TABLE):
        running.tables.drop_table(TABLE)
    running.tables.create_table(TABLE, SCHEMA).append(ROW)
    return running


def opened(server: RestCatalog, **more: str) -> TimedRest:
    access = {"credential": support.CREDENTIAL, "scope": support.SCOPE}
    given = {"type": "rest", "uri": server.uri, **access, **server.access, **more}
    return rest_catalog("lake", given)


def next_one(metadata: Metadata) -> bool:
    """A snapshot of the same files follows, unless it has."""
    main = main_of(metadata)
    if main == HEAD:
        return False
    [last] = [s for s in metadata["snapshots"] if s["snapshot-id"] == main]
    number = metadata["last-sequence-number"] + 1
    more = {"snapshot-id": HEAD, "parent-snapshot-id": main, "sequence-number": number}
    metadata["snapshots"] = [*metadata["snapshots"], {**last, **more}]
    metadata["refs"]["main"] = {**metadata["refs"]["main"], "snapshot-id": HEAD}
    return True


def head(server: RestCatalog) -> int | None:
    return server.tables.load_table(TABLE).metadata.current_snapshot_id


def said(code: int) -> Answer:
    return code, {"error": {"message": "no", "type": "NoException", "code": code}}


def test_a_commit_that_the_server_makes(server: RestCatalog) -> None:
    catalog = opened(server)
    assert edited(catalog, catalog.load_table(TABLE), next_one)
    assert head(server) == HEAD


def test_a_history_comes_by_the_file_alone(server: RestCatalog) -> None:
    """Which is read as JSON; the server's answer would be parsed."""
    server.tables.load_table(TABLE).append(ROW)
    catalog = opened(server)
    loaded = catalog.load_table(TABLE)
    before = server.brief
    found = newest(catalog, loaded)
    assert found is not None
    assert len(found.metadata["snapshots"]) == len(loaded.metadata.snapshots) == 2
    assert server.brief == before + 1
    assert len(catalog.load_table(TABLE).metadata.snapshots) == 2


@pytest.mark.parametrize("code", [400, 404, 405, 406, 409, 410, 422, 501])
def test_what_a_server_never_does_is_left_to_spark(server: RestCatalog, code: int) -> None:
    catalog = opened(server)
    loaded = catalog.load_table(TABLE)
    server.at_commit = lambda _: said(code)
    assert not edited(catalog, loaded, next_one)


@pytest.mark.parametrize("code", [401, 403, 419, 429, 500, 502, 503, 504])
def test_what_a_server_does_not_do_today_is_told(server: RestCatalog, code: int) -> None:
    catalog = opened(server)
    loaded = catalog.load_table(TABLE)
    server.at_commit = lambda _: said(code)
    with pytest.raises(Unknown, match=r"doesn't confirm that it changed n\.t: NoException: no"):
        edited(catalog, loaded, next_one)


@pytest.mark.parametrize("code", [400, 404, 409, 422, 429, 500, 501, 502, 503, 504, 200])
def test_what_is_done_whatever_was_said_is_done_once(server: RestCatalog, code: int) -> None:
    """Also where the answer isn't one of a catalog's: with code 200, a page."""
    catalog, made = opened(server), list[Answer]()
    loaded = catalog.load_table(TABLE)

    def done(commit: Commit) -> Answer:
        made.append(commit())
        return (200, "<html>") if code == 200 else said(code)

    server.at_commit = done
    assert edited(catalog, loaded, next_one)
    assert head(server) == HEAD
    assert len(made) == 1


@pytest.mark.parametrize("code", [301, 302, 303])
def test_a_commit_that_is_confirmed_and_not_made_is_told(server: RestCatalog, code: int) -> None:
    """A redirection makes a question for the table of it, which is answered in the same form."""
    catalog = opened(server)
    loaded = catalog.load_table(TABLE)
    server.at_commit = lambda _: (code, None)
    with pytest.raises(Unknown, match="by its answer main is where it was"):
        edited(catalog, loaded, next_one)
    assert head(server) != HEAD


def test_a_server_that_hangs_is_left(server: RestCatalog) -> None:
    catalog, over = opened(server), Event()
    loaded = catalog.load_table(TABLE)
    server.at_commit = lambda commit: commit() if over.wait(60) else None
    with pytest.raises(Unknown, match="timed out"):
        edited(catalog, loaded, next_one)
    over.set()


def test_a_server_that_hangs_is_asked_once_where_requests_are_signed(
    server: RestCatalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pyiceberg has ten more tries then, also for a question that nobody answers."""
    key, over = Key("k", "s3cret"), Event()
    signed = {"rest.sigv4-enabled": "true", "rest.signing-region": support.REGION}
    keys = {"client.access-key-id": key.id, "client.secret-access-key": key.secret}
    monkeypatch.setattr(server, "key", key)
    catalog = opened(server, **signed, **keys, **{"rest.signing-name": support.SERVICE})
    monkeypatch.setattr(server.tables, "load_table", lambda _: over.wait(60))
    server.asked.clear()
    with pytest.raises(ReadTimeout):
        catalog.load_table(TABLE)
    over.set()
    assert len(server.asked) == 1


def test_commits_that_are_made_after_all_are_made_once(server: RestCatalog) -> None:
    catalog, over, made = opened(server), Event(), list[Answer]()
    loaded = catalog.load_table(TABLE)

    def late(commit: Commit) -> Answer | None:
        over.wait(60)
        made.append((0, None))
        return commit()

    server.at_commit = late
    with pytest.raises(Unknown, match="timed out"):
        edited(catalog, loaded, next_one)
    assert head(server) != HEAD
    over.set()
    wait_for(lambda: len(made) == 5 and head(server) == HEAD)
    assert edited(catalog, loaded, next_one)
    found = [s.snapshot_id for s in server.tables.load_table(TABLE).metadata.snapshots]
    assert len(found) == 2
    assert len(made) == 5


def table(catalog: TimedRest, config: dict[str, str]) -> Table:
    found = catalog.load_table(TABLE)
    io = Mock(properties={**catalog.properties, **config})
    return Table(found.name(), found.metadata, found.metadata_location, io, catalog, config)


OWN = {"s3.access-key-id": "ours", "s3.secret-access-key": "ours"}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, False),
        ({"s3.access-key-id": "ours", "client.region": "eu-west-1"}, False),
        ({"s3.access-key-id": "lent"}, True),
        ({"s3.session-token": "lent"}, True),
        ({"s3.remote-signing-enabled": "true", "s3.signer.uri": "http://c"}, True),
        ({"s3.remote-signing-enabled": "false", "s3.signer.uri": "http://c"}, False),
        ({"s3.signer": "S3V4RestSigner"}, True),
        ({"client.refresh-credentials-endpoint": "v1/n/t/credentials"}, True),
        ({"gcs.oauth2.token": "lent"}, True),
        ({"adls.sas-token.a.dfs.core.windows.net": "lent"}, True),
        ({"adls.token": "lent"}, True),
        ({"adls.auth.shared-key.account.key": "lent"}, True),
        ({"oss.security-token": "lent"}, True),
        ({"token": "of the catalog"}, False),
        ({"io-impl": "org.apache.iceberg.aws.s3.S3FileIO", "s3.path-style-access": "true"}, False),
    ],
)
@pytest.mark.parametrize("when", ["a table is loaded", "the catalog is opened"])
def test_whether_a_server_lends(
    server: RestCatalog, config: dict[str, str], expected: bool, when: str
) -> None:
    early, late = (config, {}) if when == "the catalog is opened" else ({}, config)
    server.config = lambda: {"defaults": {}, "overrides": early}
    catalog = opened(server, **OWN)
    assert lends(table(catalog, late), catalog.given) is expected


def test_where_tokens_of_the_catalog_come_from_is_no_key(server: RestCatalog) -> None:
    catalog = opened(server, **OWN)
    assert not lends(table(catalog, {"oauth2-server-uri": "http://elsewhere"}), catalog.given)
