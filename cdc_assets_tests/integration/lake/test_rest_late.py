"""Commits that a REST catalog's server makes late, whose answers were lost, are made once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cdc_assets.errors import Fenced
from cdc_assets.lake.catalog.commits import Unknown
from cdc_assets.lake.drafts.tables import TableDraft
from cdc_assets.lake.spark.session import open_session
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.support.lake import Lake, NewLake
from cdc_assets_tests.support.rest_proxy import UNAVAILABLE, Answer, Forward, Proxy, rest_proxy
from cdc_assets_tests.support.rest_reference import rest_reference

pytestmark = pytest.mark.spark

T = TableId("public", "t")
# Without a key: a replay would double rows, and a hole leave some out.
SETUP = """
create table t (v text);
alter table t replica identity full;
insert into t select 'copied ' || i from generate_series(1, 50) i;
"""
CHANGES = """
insert into t values ('twice'), ('twice');
delete from t where ctid = (select min(ctid) from t);
"""


@pytest.fixture(params=[2, 3], ids="format-v{}".format)
def opened(
    request: pytest.FixtureRequest, copied_lake: NewLake, postgres_dsn: NewDatabase, tmp_path: Path
) -> Iterator[tuple[Lake, Proxy]]:
    warehouse = f"file://{tmp_path}/warehouse"
    with rest_reference(postgres_dsn(), warehouse) as uri, rest_proxy(uri) as proxy:
        catalog: dict[str, Any] = {"type": "rest", "uri": proxy.uri, "warehouse": warehouse}
        lake = {"catalog": catalog, "format_version": request.param}
        with copied_lake(SETUP, "t", lake=lake) as source:
            change(source)
            source.drain(T)
            yield source, proxy


def change(source: Lake) -> None:
    source.execute(CHANGES)
    source.flush()


def kept_back(source: Lake, proxy: Proxy) -> list[Forward]:
    """Have a merge fail, none of whose commits reaches the server yet."""
    late = list[Forward]()

    def keep(commit: Forward) -> Answer:
        late.append(commit)
        return UNAVAILABLE

    change(source)
    proxy.at_commit = keep
    with pytest.raises(Unknown, match="doesn't confirm"):
        source.drain(T)
    proxy.at_commit = lambda commit: commit()
    assert len(late) == 5
    return late


@contextmanager
def before_publishing(monkeypatch: pytest.MonkeyPatch, late: list[Forward]) -> Iterator[None]:
    publish = TableDraft.publish

    def slow(draft: TableDraft) -> None:
        assert late.pop()()[0] == 200
        publish(draft)

    with monkeypatch.context() as patched:
        patched.setattr(TableDraft, "publish", slow)
        yield


def test_before_the_next_merge(opened: tuple[Lake, Proxy]) -> None:
    source, proxy = opened
    late = kept_back(source, proxy)
    assert [commit()[0] for commit in late] == [200, 409, 409, 409, 409]
    change(source)
    source.drain(T)
    assert source.equal(T)


def test_while_the_next_merge_is_made(
    opened: tuple[Lake, Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, proxy = opened
    late = kept_back(source, proxy)
    change(source)
    with before_publishing(monkeypatch, late), pytest.raises(Fenced):
        source.drain(T)
    source.drain(T)
    assert source.equal(T)
    assert {commit()[0] for commit in late} == {409}


def test_after_the_next_merge(opened: tuple[Lake, Proxy]) -> None:
    source, proxy = opened
    late = kept_back(source, proxy)
    change(source)
    source.drain(T)
    assert {commit()[0] for commit in late} == {409}
    assert source.equal(T)
    change(source)
    source.drain(T)
    assert source.equal(T)


def test_another_commit_follows_before_the_next_look(opened: tuple[Lake, Proxy]) -> None:
    """The merge is published: nobody took over."""
    source, proxy = opened
    other, name = open_session(source.config), source.lake_table(T).procedure_name
    rewritten = "options => map('rewrite-all', 'true')"

    def lose(commit: Forward) -> Answer:
        proxy.at_commit = lambda commit: commit()
        assert commit()[0] == 200
        other.sql(f"call lake.system.rewrite_data_files(table => {name}, {rewritten})").collect()
        return UNAVAILABLE

    change(source)
    proxy.at_commit = lose
    source.drain(T)
    assert source.equal(T)
    other.stop()
