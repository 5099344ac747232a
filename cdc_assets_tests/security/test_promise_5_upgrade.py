"""Promise 5: processes from before locks were rows lose their sessions, or are named."""

from __future__ import annotations

import threading

import psycopg
import pytest

from cdc_assets.errors import CoordinationError
from cdc_assets.log.schema import versions as log_schema
from cdc_assets.log.store import LogStore
from cdc_assets_tests.security.coordination import SCHEMA, Session, of, opened
from cdc_assets_tests.support.waiting import wait_for


def _as_before(connection: Session) -> None:
    """The schema as the version before locks were rows left it."""
    connection.execute(
        f"drop table {SCHEMA}.locks, {SCHEMA}.lost_care, {SCHEMA}.signals,"
        f" {SCHEMA}.held_tables,"
        f" {SCHEMA}.backfill_chunks, {SCHEMA}.backfills,"
        f" {SCHEMA}.marked_tables, {SCHEMA}.marks, {SCHEMA}.work_done, {SCHEMA}.markers;"
        f" alter table {SCHEMA}.log_index drop column sha256;"
        f" alter table {SCHEMA}.claims drop column problem, drop column problem_since;"
        f" alter table {SCHEMA}.mat_cursor drop column copy, drop column snapshot_id;"
        f" alter table {SCHEMA}.tables drop column masks, drop column mask_numbers,"
        " drop column mask_wish, drop column filter_wanted, drop column row_filter,"
        " drop column filter_wish, drop column log_from, drop column copied_chunks,"
        " drop column copied_rows, drop column copied_at;"
        f" alter table {SCHEMA}.pins drop column held, drop column server_started,"
        " drop column read_lsn;"
        f" alter table {SCHEMA}.snapshot_progress drop column read_lsn,"
        " drop column database;"
        f" alter table {SCHEMA}.verified_samples drop column round_saw;"
        f" alter table {SCHEMA}.query_watermarks drop column epoch, drop column rule,"
        " drop column bound, drop column level, drop column level_at,"
        " add column watermark text;"
        f" insert into {SCHEMA}.pipeline_meta values ('src', 'x', 'x') on conflict do nothing;"
        f" delete from {SCHEMA}.schema_version where version >= {log_schema._LOCKS}".encode()
    )


def test_processes_of_before_lose_their_sessions_before_this_version_takes_a_lock(
    ours: str, stranger: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their locks were others. A new session of theirs waits, and finds a newer schema."""
    opened(ours).close()
    stranger.execute("set application_name = 'cdc_assets src log'")  # which anybody may say
    found, end_earlier = list[object](), log_schema._end_earlier

    def look() -> None:
        with psycopg.connect(ours) as comes_back:
            newest = f"select max(version) from {SCHEMA}.schema_version"
            found.extend(comes_back.execute(newest.encode()).fetchone() or ())

    looks = threading.Thread(target=look)

    def then_one_comes_back(cursor: psycopg.Cursor[tuple[object, ...]], schema: str) -> None:
        end_earlier(cursor, schema)
        looks.start()
        wait_for(
            lambda: (
                stranger.execute(
                    "select count(*) from pg_locks where not granted and relation is not null"
                ).fetchone()
                == (1,)
            )
        )

    monkeypatch.setattr(log_schema, "_end_earlier", then_one_comes_back)
    name = "cdc_assets src log"
    with psycopg.connect(ours, autocommit=True, application_name=name) as before:
        _as_before(before)
        before.execute("select pg_advisory_lock(1)")
        opened(ours).close()
        looks.join(20)
        assert found == [log_schema.newest()]
        with pytest.raises(psycopg.OperationalError):
            before.execute("select")
    stranger.execute("select")  # it isn't ours to end


def test_processes_of_before_that_are_not_ours_to_end_are_named(
    database: str, ours: str, admin: Session
) -> None:
    opened(ours).close()
    admin.execute(f"grant select on {SCHEMA}.schema_version to maker".encode())
    name = "cdc_assets src log"
    with psycopg.connect(of(database, "maker"), application_name=name) as before:
        _as_before(admin)
        with pytest.raises(CoordinationError, match=rf"\b{before.info.backend_pid}\b.*Stop those"):
            opened(ours)
    opened(ours).close()


@pytest.mark.parametrize("how", ["of a role that ours is a member of", "without inheriting"])
def test_processes_of_before_are_ended_only_by_who_has_their_rights(
    database: str, ours: str, admin: Session, how: str
) -> None:
    """Membership alone doesn't let a session be ended; that says so, by name."""
    opened(ours).close()
    admin.execute(f"grant select on {SCHEMA}.schema_version to maker; grant maker to cdc_state")
    if how == "without inheriting":
        admin.execute("alter role cdc_state noinherit; revoke maker from cdc_state")
        admin.execute("grant maker to cdc_state")
    name = "cdc_assets src log"
    with psycopg.connect(of(database, "maker"), application_name=name) as before:
        _as_before(admin)
        if how == "without inheriting":
            with pytest.raises(CoordinationError, match=rf"\b{before.info.backend_pid}\b.*Stop"):
                opened(ours)
        else:
            opened(ours).close()
            with pytest.raises(psycopg.OperationalError):
                before.execute("select")


def test_an_upgrade_ends_no_session_of_another_schema_in_the_database(
    ours: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def key(schema: str, name: str) -> str:
        return f"select pg_advisory_lock(hashtextextended('cdc_assets:{schema}:src:{name}', 0))"

    def session(source: str) -> Session:
        name = f"cdc_assets {source} log"
        return psycopg.connect(ours, autocommit=True, application_name=name)

    opened(ours).close()
    LogStore.open(ours, "src", "another").close()
    with monkeypatch.context() as patched, session("src") as noted, session("src") as locks:
        patched.setattr(log_schema, "_END_SECONDS", 1.0)
        with session("src") as alike, session("other") as other:
            _as_before(alike)
            noted.execute(
                f"insert into {SCHEMA}.sessions (pid, backend_start, source, holder, process)"
                " select pid, backend_start, 'src', gen_random_uuid(), 'x' from pg_stat_activity"
                " where pid = pg_backend_pid()".encode()
            )
            locks.execute(key(SCHEMA, "flusher:src").encode())
            alike.execute(key("another", "flusher:src").encode())
            with pytest.raises(CoordinationError, match="of another schema") as refused:
                opened(ours)
            assert f"the sessions {alike.info.backend_pid}." in str(refused.value)
            for session_of_ours in (noted, locks):
                with pytest.raises(psycopg.OperationalError):
                    session_of_ours.execute("select")
            alike.execute("select")
            alike.close()
            opened(ours).close()
            other.execute("select")
