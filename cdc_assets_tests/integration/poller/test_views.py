"""Views, materialized views and foreign tables, whose keys are configured."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.log.states import TableState
from cdc_assets.poller.poller import Poll
from cdc_assets.postgres.names import TableId
from cdc_assets.readiness.flushing import source_findings
from cdc_assets_tests.conftest import NewDatabase, databases
from cdc_assets_tests.support.foreign import REMOTE, foreign
from cdc_assets_tests.support.queried import BY_CLOCK, CLOCKED, Queried, queried
from cdc_assets_tests.support.waiting import wait_for

W = TableId("public", "w")
OF_W = BY_CLOCK | {"name": "w", "key": ["id"]}
LAGGING = OF_W | {"watermark": {"column": "updated_at", "lag": "3s"}}
JOINED = f"""{CLOCKED}
create table owner (id int primary key, name text, updated_at timestamptz not null default now());
create view w as select t.id, t.v, o.name, greatest(t.updated_at, o.updated_at) as updated_at
  from t left join owner o on o.id = t.id % 10 where t.v <> 'hidden';
"""


def errors(source: Queried) -> dict[str, Any]:
    return {f.code: f for f in source_findings(source.config) if f.severity == "error"}


@pytest.fixture
def source(postgres_dsn: NewDatabase, tmp_home: object) -> Iterator[Queried]:
    with queried(postgres_dsn(), JOINED, OF_W) as opened:
        yield opened


def test_a_view_is_polled_by_what_any_of_its_tables_changed(source: Queried) -> None:
    assert not errors(source)
    source.execute("insert into t select i, 'x' from generate_series(1, 50) i")
    source.execute("insert into t values (99, 'hidden')")
    source.poll()
    assert source.is_level(W)
    for _ in range(2):
        source.poll()
    assert len(source.staged(W)) == 50, "each row once"
    source.execute("insert into owner values (3, 'of many')")
    source.execute("update t set v = 'shown', updated_at = now() where id = 99")
    source.poll()
    assert source.found(W)["13"]["name"] == "of many"
    assert source.is_level(W)


def test_a_late_commit_below_a_view_is_found(
    source: Queried, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdc_assets.poller.source.MARGIN", 0)
    with source.session() as older:
        older.execute("begin")
        older.execute("insert into t values (1, 'older')")
        source.execute("insert into t values (2, 'younger')")
        source.poll()
        source.poll()
        assert source.found(W).keys() == {"2"}
        older.execute("commit")
        source.poll()
    assert source.is_level(W)


def test_a_view_that_is_made_otherwise_is_followed_or_parked(source: Queried) -> None:
    source.execute("insert into t values (1, 'x')")
    source.poll()
    source.execute("alter view w rename column name to called")
    source.execute("insert into t values (2, 'x')")
    source.poll()
    assert "called" in source.found(W)["2"]
    source.execute("drop view w; create view w as select id, v, updated_at from t")
    source.poll()
    [row] = source.pipeline.store.tables()
    assert row.state == TableState.PARKED
    assert "isn't the one that is registered" in str(row.reason)


def test_a_view_that_fails_or_has_no_key_for_a_row_says_so(source: Queried) -> None:
    source.execute(
        "create or replace view w as select t.id, (10 / (t.id - 5))::text as v, '' as name,"
        " t.updated_at from t"
    )
    source.execute("insert into t values (5, 'x')")
    assert not source.poll()
    assert "public.w wasn't read" in source.progress.troubles["queries"]
    source.execute(
        "create or replace view w as select nullif(t.id, 5) as id, t.v, '' as name,"
        " t.updated_at from t"
    )
    wait_for(lambda: not source.poll() and "NULL" in source.progress.troubles["queries"])
    source.execute("delete from t")
    wait_for(source.poll)


@pytest.mark.parametrize(
    ("view", "table", "code"),
    [
        ("select id, v, updated_at from t", BY_CLOCK | {"name": "w"}, "watermark"),
        ("select id, v, updated_at from t", OF_W | {"key": ["nr"]}, "table_missing"),
        ("select id, v, updated_at from t union all select * from t", OF_W, "key_not_unique"),
        ("select nullif(id, 1) as id, v, updated_at from t", OF_W, "key_null"),
        ("select id, v, nullif(updated_at, updated_at) as updated_at from t", OF_W, "watermark"),
        ("select id, v, updated_at::date as updated_at from t", OF_W, "watermark"),
        ("select id, v, array[updated_at] as updated_at from t", OF_W, "watermark"),
    ],
)
def test_check_says_what_a_view_lacks(
    postgres_dsn: NewDatabase, tmp_home: object, view: str, table: Any, code: str
) -> None:
    made = f"{CLOCKED} insert into t values (1, 'x'); create view w as {view}"
    with queried(postgres_dsn(), made, table, pinned=False) as source:
        found = errors(source)
        assert code in found
        assert found[code].remedy


def test_a_key_that_takes_too_long_to_count_is_told(
    postgres_dsn: NewDatabase, tmp_home: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdc_assets.readiness.asked.keys._SECONDS", 1)
    made = f"{CLOCKED} insert into t values (1, 'x'); create view w as select id, v, updated_at"
    made += ", pg_sleep(3)::text as slept from t"
    with queried(postgres_dsn(), made, OF_W, pinned=False) as source:
        codes = {f.code: f.severity for f in source_findings(source.config)}
        assert codes["key_unproven"] == "warning"


def test_a_table_without_a_key_takes_a_configured_one_alone(
    postgres_dsn: NewDatabase, tmp_home: object
) -> None:
    keyless = CLOCKED.replace(" primary key", " not null").replace(" t ", " w ")
    with queried(postgres_dsn(), keyless, OF_W) as source:
        assert not errors(source)
        source.execute("insert into w values (1, 'x'), (2, 'x')")
        source.poll()
        assert source.is_level(W)
        source.execute("alter table w add primary key (id)")
        assert "key: out of" in errors(source)["table_missing"].remedy


def test_a_materialized_view_is_found_as_it_is_refreshed(
    postgres_dsn: NewDatabase, tmp_home: object
) -> None:
    made = f"{CLOCKED} create materialized view w as select id, v, updated_at from t;"
    made += "create unique index on w (id); create index on w (updated_at)"
    with queried(postgres_dsn(), made, OF_W, pinned=False) as source:
        assert "lag" in errors(source)["watermark"].remedy
    with queried(postgres_dsn(), made, LAGGING) as source:
        assert not errors(source)
        source.execute("insert into t values (1, 'x'), (2, 'x')")
        source.poll()
        for refresh in ("", "concurrently"):
            source.execute(f"refresh materialized view {refresh} w")
            source.execute("update t set v = v || 'y', updated_at = now() where id = 2")
            source.poll()
            assert source.is_level(W)
        with source.session() as locking:
            locking.execute("begin; refresh materialized view w")
            assert not source.poll(), "it isn't waited for"


# --- foreign tables ---


@pytest.fixture
def debians(postgres_servers: Callable[[int], EmbeddedPostgres]) -> Iterator[NewDatabase]:
    with databases(postgres_servers(15)) as new:
        yield new


@pytest.fixture
def remote(debians: NewDatabase) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(debians(), autocommit=True) as connection:
        connection.execute(REMOTE.encode())
        yield connection


def address(remote: psycopg.Connection[Any]) -> str:
    return f"{remote.info.dsn} password={remote.info.password}"


def test_a_foreign_table_is_polled_with_a_lag(
    debians: NewDatabase, remote: psycopg.Connection[Any], tmp_home: object
) -> None:
    made = foreign(address(remote), "w")
    with queried(debians(), made, OF_W, pinned=False) as source:
        assert "transactions that aren't seen here" in errors(source)["watermark"].message
        source.pins.prepare()
        [row] = source.pipeline.store.tables()
        assert row.state == TableState.PARKED
    with queried(debians(), made, LAGGING) as source:
        assert not errors(source)
        remote.execute("insert into far values (1, 'x'), (2, 'x')")
        source.poll()
        assert source.is_level(W)
        with psycopg.connect(address(remote)) as older:
            older.execute("insert into far values (3, 'late')")
            for number in (10, 11):
                remote.execute(f"insert into far values ({number}, 'x')".encode())
                source.poll()
                time.sleep(0.5)
            older.commit()
        source.poll()
        assert source.is_level(W)
        before = len(source.staged(W))
        source.poll()
        assert len(source.staged(W)) == before, "what is read again is staged once"


def test_a_server_that_is_down_holds_up_its_tables_alone(
    debians: NewDatabase, remote: psycopg.Connection[Any], tmp_home: object
) -> None:
    made = CLOCKED + foreign(address(remote), "w")
    with queried(debians(), made, BY_CLOCK, LAGGING) as source:
        source.execute("alter server elsewhere options (set port '1')")
        source.execute("insert into t values (1, 'x')")
        assert not source.poll()
        assert "public.w wasn't read" in source.progress.troubles["queries"]
        assert source.is_level()


def test_tables_of_a_server_that_hangs_are_asked_one_by_one_after_all_others(
    debians: NewDatabase,
    remote: psycopg.Connection[Any],
    tmp_home: object,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each takes as long as a statement may, and the others waited for all of them."""
    monkeypatch.setattr("cdc_assets.flusher.polling.POLLS", "set statement_timeout = '1s'")
    monkeypatch.setattr("cdc_assets.poller.poller.LONG_SECONDS", 0.5)
    asked = list[list[str]]()
    read = Poll.read

    def noted(self: Poll, source: Any) -> Any:
        asked.append([table.name for table in self.asked])
        return read(self, source)

    monkeypatch.setattr(Poll, "read", noted)
    made = CLOCKED + foreign(address(remote), "a")
    made += "create foreign table b (id int, v text, updated_at timestamptz) server elsewhere"
    made += " options (table_name 'far')"
    tables = [LAGGING | {"name": name} for name in "ab"]
    with queried(debians(), made, *tables, BY_CLOCK) as source:
        source.execute("insert into t values (1, 'x')")
        with psycopg.connect(address(remote)) as locking:
            locking.execute("lock table far")
            assert not source.poll()
            assert asked[:3] == [["a", "b", "t"], ["b", "t"], ["t"]]
            assert source.is_level()
            asked.clear()
            source.execute("insert into t values (2, 'x')")
            wait_for(lambda: source.poller.again_at < time.monotonic())
            polling = threading.Thread(target=source.poll)
            polling.start()
            wait_for(lambda: len(asked) == 2)
            assert asked[0] == ["t"]
            assert source.is_level()
            polling.join()
        wait_for(source.poll)


def test_a_server_without_a_connect_timeout_is_told(
    debians: NewDatabase, remote: psycopg.Connection[Any], tmp_home: object
) -> None:
    """Before Postgres 16 no time-out ends such a wait."""
    made = foreign(address(remote)) + "create view w as select * from f"
    with queried(debians(), made, LAGGING, pinned=False) as source:
        code = "foreign_server_untimed"
        [found] = [f for f in source_findings(source.config) if f.code == code]
        source.execute(found.remedy)
        assert code not in {f.code for f in source_findings(source.config)}


def test_a_view_of_a_foreign_table_needs_a_lag_as_well(
    debians: NewDatabase, remote: psycopg.Connection[Any], tmp_home: object
) -> None:
    made = CLOCKED + foreign(address(remote))
    made += "create view v as select * from f; create view w as select v.* from v join t using (id)"
    with queried(debians(), made, OF_W, pinned=False) as source:
        assert "public.f below it" in errors(source)["watermark"].message
    with queried(debians(), made, LAGGING, pinned=False) as source:
        assert not errors(source)


def test_where_changes_come_by_a_slot_a_view_is_refused(
    postgres_dsn: NewDatabase, tmp_home: object
) -> None:
    with queried(postgres_dsn(), JOINED, {"name": "w"}, query=None, pinned=False) as source:
        assert "query:" in errors(source)["table_missing"].remedy
