"""Promise 5: what others keep in the coordination database is refused or named; locks are ours.

``stranger`` may connect, and no more; ``maker`` may make schemas, too; ``cdc_state`` is our role,
which isn't a superuser, and ``ours`` its address.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.errors import CoordinationError
from cdc_assets.lake.catalog import place as catalog_place
from cdc_assets.lake.catalog.catalog import open_catalog, spark_settings, tried
from cdc_assets.lake.catalog.place import catalog_schema
from cdc_assets.log.schema import versions as log_schema
from cdc_assets.log.sessions.connection import connect_log
from cdc_assets.log.store import LogStore
from cdc_assets.messages.findings import Finding
from cdc_assets.observe.status import collect
from cdc_assets.pipeline import Pipeline
from cdc_assets.readiness.flushing import coordination_findings
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.flusher_support import bench, flushing, wait_for

SCHEMA = "_pg2iceberg"
ROLES = ("stranger", "maker", "cdc_state")
# The advisory locks that decided before, of which anybody knows the keys.
OLD_KEYS = ("flusher:src", "pins", "heaps", "catalog", "write:public.t")

Session = psycopg.Connection[tuple[object, ...]]


def of(dsn: str, role: str) -> str:
    return make_conninfo(dsn, user=role, password="p")


@pytest.fixture
def database(postgres_dsn: NewDatabase) -> Iterator[str]:
    """A superuser's address."""
    dsn = postgres_dsn()
    with psycopg.connect(dsn, autocommit=True) as admin:
        name = sql.Identifier(admin.info.dbname)
        for role in ROLES:
            admin.execute(f"create role {role} login password 'p'".encode())
        for role in ("maker", "cdc_state"):
            who = sql.Identifier(role)
            admin.execute(sql.SQL("grant create on database {} to {}").format(name, who))
        yield dsn
        admin.execute(
            "select pg_terminate_backend(pid, 5000) from pg_stat_activity where usename = any(%s)",
            (list(ROLES),),
        )
        for role in ROLES:
            admin.execute(f"drop owned by {role} cascade; drop role {role}".encode())


@pytest.fixture
def admin(database: str) -> Iterator[Session]:
    with psycopg.connect(database, autocommit=True) as connection:
        yield connection


@pytest.fixture
def maker(database: str) -> Iterator[Session]:
    with psycopg.connect(of(database, "maker"), autocommit=True) as connection:
        yield connection


@pytest.fixture
def stranger(database: str) -> Iterator[Session]:
    with psycopg.connect(of(database, "stranger"), autocommit=True) as connection:
        yield connection


@pytest.fixture
def ours(database: str) -> str:
    return of(database, "cdc_state")


def opened(dsn: str) -> LogStore:
    return LogStore.open(dsn, "src", SCHEMA)


def config_of(dsn: str) -> SourceConfig:
    given = {"name": "src", "postgres": {"dsn": dsn}, "tables": [{"name": "public.t"}]}
    return parse_config(given, "test")


def checked(dsn: str) -> dict[str, Finding]:
    return {finding.code: finding for finding in coordination_findings(config_of(dsn))}


# --- locks ---


def _take_everything(stranger: Session) -> None:
    """Every key that was ours, and every one that is to be seen, now or once it is free."""
    for name in OLD_KEYS:
        stranger.execute(
            "select pg_try_advisory_lock(hashtextextended(%s, 0))",
            (f"cdc_assets:{SCHEMA}:src:{name}",),
        )
    stranger.execute("select pg_try_advisory_lock(%s, hashtext(%s))", (0x636463, SCHEMA))
    stranger.execute(
        "select pg_try_advisory_lock(classid::bigint << 32 | objid::bigint) from pg_locks"
        " where locktype = 'advisory' and objsubid = 1"
    )


def test_whoever_may_only_connect_takes_no_lock_of_ours(ours: str, stranger: Session) -> None:
    _take_everything(stranger)
    one, other = opened(ours), opened(ours)  # a stranger's lock doesn't keep it from being made
    for name in OLD_KEYS:
        assert one.try_lock(name)
        assert not other.try_lock(name)
        _take_everything(stranger)
        one.unlock(name)
        assert not other.is_locked(name)
        assert other.lock_within(name, 5)
    for forbidden in (
        "select * from _pg2iceberg.locks",
        "insert into _pg2iceberg.locks (source, name) values ('src', 'pins')",
        "lock table _pg2iceberg.locks in share mode",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege), stranger.transaction():
            stranger.execute(forbidden.encode())
    one.close()
    other.close()


def test_whoever_waits_for_the_end_of_a_session_of_ours_has_none_of_its_locks(
    ours: str, stranger: Session
) -> None:
    one, other = opened(ours), opened(ours)
    one.lock("pins")
    (key,) = stranger.execute(
        "select classid::bigint << 32 | objid::bigint from pg_locks where locktype = 'advisory'"
        " and pid = %s",
        (one.connection.info.backend_pid,),
    ).fetchall()[0]
    waits = threading.Thread(
        target=stranger.execute, args=("select pg_advisory_lock(%s)", (key,)), daemon=True
    )
    waits.start()
    wait_for(lambda: _waiting(other.connection))
    assert other.lock_holder("pins") == one.connection.info.backend_pid
    one.close()
    waits.join(20)
    assert not waits.is_alive()  # it has the key now, and that is all
    assert other.lock_holder("pins") is None
    assert other.try_lock("pins")
    other.close()


def _waiting(connection: Session) -> bool:
    row = connection.execute(
        "select exists (select from pg_locks where locktype = 'advisory' and not granted)"
    ).fetchone()
    return bool(row and row[0])


def test_replication_goes_on_whatever_locks_a_stranger_takes(
    postgres: EmbeddedPostgres, tmp_path: Path
) -> None:
    dsn = postgres.dsn()
    assert dsn is not None
    with bench(dsn, "src", tmp_path) as source:
        source.execute("create table t (id int primary key)")
        source.execute("drop role if exists stranger; create role stranger login password 'p'")
        try:
            with psycopg.connect(of(source.dsn, "stranger"), autocommit=True) as stranger:
                _take_everything(stranger)
                with flushing(source.config("public.t")) as progress:
                    wait_for(lambda: progress.state == "streaming")
                    _take_everything(stranger)
                    source.execute("insert into t select generate_series(1, 3)")
                    wait_for(lambda: len(source.log("public.t")) == 3)
                source.execute("insert into t values (4)")
                source.flush(source.config("public.t"))
                assert len(source.log("public.t")) == 4
        finally:
            source.execute("drop role stranger")


def test_invariant_9_a_lock_is_one_sessions_however_many_want_it_and_wherever_they_die(
    ours: str,
) -> None:
    inside, most, turns, deaths = list[int](), 0, list[int](), 0
    chance = random.Random(5)

    def work(who: int) -> None:
        nonlocal most, deaths
        store = opened(ours)
        for _ in range(25):
            took = store.try_lock("x") if chance.random() < 0.5 else store.lock_within("x", 10)
            if not took:
                continue
            inside.append(who)
            most = max(most, len(inside))
            turns.append(who)
            time.sleep(chance.random() / 200)
            inside.remove(who)
            if chance.random() < 0.2:
                deaths += 1
                with pytest.raises(psycopg.OperationalError):
                    store.connection.execute("select pg_terminate_backend(pg_backend_pid())")
                store = opened(ours)
            else:
                store.unlock("x")
        store.close()

    threads = [threading.Thread(target=work, args=(who,)) for who in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert (most, inside) == (1, [])
    assert len(turns) > 50
    assert set(turns) == set(range(5))
    assert deaths > 5
    with opened(ours).connection as left:
        LogStore(left, "src", SCHEMA).forget_locks()
        assert left.execute("select count(*) from locks").fetchone() == (0,)


@pytest.mark.parametrize("before", ["nobody has had it", "its holder died", "it was given back"])
def test_invariant_9_who_has_just_seen_a_lock_free_does_not_take_it_from_who_has_it_by_now(
    ours: str, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    one, faster = opened(ours), opened(ours)
    if before != "nobody has had it":
        faster.lock("x")
        faster.connection.execute(f"update {SCHEMA}.locks set wanted_until = now()".encode())
        if before == "its holder died":
            faster.close()
            faster = opened(ours)
            wait_for(lambda: not one.is_locked("x"))
        else:  # while somebody waited who has gone
            faster.connection.execute("update locks set life = null")
            faster._held.clear()
    look = one._look

    def and_is_late(name: str, *, judge: bool) -> object:
        seen = look(name, judge=judge)
        assert faster.try_lock("x")
        return seen

    monkeypatch.setattr(one, "_look", and_is_late)
    assert not one.try_lock("x")
    assert faster.lock_holder("x") == faster.connection.info.backend_pid
    one.close()
    faster.close()


def test_a_pool_that_cleans_a_session_up_ends_its_locks(ours: str) -> None:
    """The backend lives on there, for another client."""
    one, other = opened(ours), opened(ours)
    one.lock("pins")
    assert not other.try_lock("pins")
    one.connection.execute("discard all")
    assert other.try_lock("pins")
    one.close()
    other.close()


def test_a_lock_does_not_make_what_is_registered_wait_less_for_the_disk(ours: str) -> None:
    store = opened(ours)
    assert store.try_lock("x")
    store.unlock("x")
    found = store.connection.execute("show synchronous_commit").fetchone()
    assert found == ("on",)
    with pytest.raises(AssertionError), store.connection.transaction():
        store.try_lock("x")
    store.close()


def test_a_lock_that_can_not_be_given_back_ends_its_session(ours: str, admin: Session) -> None:
    """It would keep the lock, and its process wouldn't know."""
    one, other = opened(ours), opened(ours)
    one.lock("x")
    one.connection.execute("set statement_timeout = '100ms'")
    with admin.transaction():
        admin.execute(f"select from {SCHEMA}.locks for update".encode())
        with pytest.raises(psycopg.errors.QueryCanceled):
            one.unlock("x")
    wait_for(lambda: other.try_lock("x"))
    assert one.connection.closed
    other.close()


def test_a_session_that_was_interrupted_while_it_took_a_lock_has_it(
    ours: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would wait for itself."""
    one, other = opened(ours), opened(ours)
    execute = one.connection.execute

    def interrupted(statement: str, *given: object) -> object:
        done = execute(statement, *given)  # type: ignore[call-overload]
        if statement.startswith("\ninsert into locks"):
            raise KeyboardInterrupt
        return done

    with monkeypatch.context() as signals:
        signals.setattr(one.connection, "execute", interrupted)
        with pytest.raises(KeyboardInterrupt):
            one.try_lock("x")
    assert not other.try_lock("x")
    assert one.lock_within("x", 1)
    one.unlock("x")
    assert other.try_lock("x")
    one.close()
    other.close()


@pytest.mark.parametrize("wish", ["'infinity'", "clock_timestamp() + interval '1 hour'"])
def test_a_wish_of_before_the_clock_was_set_back_is_over(
    ours: str, admin: Session, wish: str
) -> None:
    one, other = opened(ours), opened(ours)
    one.lock("x")
    admin.execute(f"update {SCHEMA}.locks set wanted_by = 1, wanted_until = {wish}".encode())
    one.unlock("x")
    assert other.try_lock("x")
    admin.execute(f"update {SCHEMA}.locks set wanted_by = 1, wanted_until = {wish}".encode())
    other.close()
    wait_for(lambda: one.lock_within("x", 1))
    admin.execute(f"update {SCHEMA}.locks set wanted_by = 1, wanted_until = {wish}".encode())
    one.close()
    third = opened(ours)
    wait_for(lambda: not third.is_locked("x"))
    third.forget_locks()
    assert third.connection.execute("select count(*) from locks").fetchone() == (0,)
    third.close()


def test_who_waits_for_a_row_goes_on_with_what_it_has_become(ours: str, admin: Session) -> None:
    """Whatever isolation the role has by default: else it would fail."""
    admin.execute("alter role cdc_state set default_transaction_isolation = 'serializable'")
    one, other = opened(ours), opened(ours)
    one.lock("x")
    one.connection.execute("update locks set life = null")
    one._held.clear()
    took = list[bool]()
    with admin.transaction():
        admin.execute(f"update {SCHEMA}.locks set pid = 0".encode())
        waits = threading.Thread(target=lambda: took.append(other.try_lock("x")), daemon=True)
        waits.start()
        wait_for(lambda: _row_waits(admin))
    waits.join(20)
    assert took == [True]
    one.close()
    other.close()


def _row_waits(connection: Session) -> bool:
    row = connection.execute(
        "select exists (select from pg_locks where locktype = 'transactionid' and not granted)"
    ).fetchone()
    return bool(row and row[0])


def test_who_waits_for_a_lock_of_ours_is_shown_with_its_holder(ours: str, admin: Session) -> None:
    one, other = opened(ours), opened(ours)
    one.lock("pins")
    assert one.lock_waits() == ()
    waits = threading.Thread(target=other.lock, args=("pins",), daemon=True)
    waits.start()
    wait_for(one.lock_waits)
    admin.execute("create table t (id int primary key)")
    with Pipeline.open(config_of(ours)) as pipeline:
        (told,) = collect(pipeline).lock_waits
    holds, wants = one.connection.info.backend_pid, other.connection.info.backend_pid
    assert told.sentence == f"session {wants} waits for our lock pins, held by session {holds}"
    one.unlock("pins")
    waits.join(20)
    assert one.lock_waits() == ()
    one.close()
    other.close()


def _as_before(connection: Session) -> None:
    """The schema as the version before locks were rows left it."""
    connection.execute(
        f"drop table {SCHEMA}.locks, {SCHEMA}.lost_care;"
        f" alter table {SCHEMA}.log_index drop column sha256;"
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


# --- the schema ---


CANARY = """
create table canary (role text); grant insert on canary to public;
create function bite() returns bool language plpgsql as $$
begin insert into public.canary values (current_user); return true; end $$;
create function bite_trigger() returns trigger language plpgsql as $$
begin insert into public.canary values (current_user); return new; end $$;
"""
SQUATTED = {
    "an empty one": "",
    "one like ours": "create table schema_version (version int primary key, applied_at"
    " timestamptz default now()); insert into schema_version values (19)",
    "a view that bites": "create view schema_version as select 999 as version where public.bite()",
    "a table that bites": "create table schema_version (version int, applied_at bool"
    " default public.bite()); create trigger t before insert on schema_version for each row"
    " execute function public.bite_trigger()",
    "the catalog's": "create table iceberg_tables (catalog_name text, table_namespace text);"
    " create table iceberg_namespace_properties (catalog_name text)",
}


@pytest.mark.parametrize("what", SQUATTED)
@pytest.mark.parametrize("role", ["ours", "a superuser"])
def test_a_schema_that_somebody_made_before_us_is_refused_and_its_owner_named(
    database: str, admin: Session, maker: Session, tmp_home: Path, what: str, role: str
) -> None:
    admin.execute(CANARY)
    maker.execute(f"create schema {SCHEMA}; set search_path = {SCHEMA}".encode())
    maker.execute(SQUATTED[what].encode())
    maker.execute(f"grant all on schema {SCHEMA} to public".encode())
    maker.execute(f"grant all on all tables in schema {SCHEMA} to public".encode())
    dsn = database if role == "a superuser" else of(database, "cdc_state")
    for open_it in (opened, lambda dsn: LogStore.peek(dsn, "src", SCHEMA)):
        with pytest.raises(CoordinationError, match=r"belongs to the role maker.*state\.schema"):
            open_it(dsn)
    assert checked(dsn)["coordination_foreign"].severity == "error"
    config = config_of(dsn)
    with pytest.raises(CoordinationError, match="maker"):
        open_catalog(config)
    with pytest.raises(CoordinationError, match="maker"), tried(config):
        pass
    assert admin.execute("select * from canary").fetchall() == []
    # The ways out that the message has; to be given what bites is none.
    given = "owner to" in checked(dsn)["coordination_foreign"].remedy
    assert given == ("bites" not in what)
    LogStore.open(dsn, "src", "another_name").close()
    maker.execute(f"drop schema {SCHEMA} cascade".encode())
    opened(dsn).close()
    assert checked(dsn) == {}


def test_a_schema_that_somebody_makes_while_we_do_is_refused(
    database: str, ours: str, maker: Session, stranger: Session
) -> None:
    refused = list[BaseException]()

    def open_it() -> None:
        try:
            opened(ours)
        except CoordinationError as error:
            refused.append(error)

    thread = threading.Thread(target=open_it)
    with maker.transaction():
        maker.execute(f"create schema {SCHEMA}".encode())
        thread.start()
        wait_for(
            lambda: (
                stranger.execute("select count(*) from pg_locks where not granted").fetchone()
                == (1,)
            )
        )
    thread.join(20)
    assert "belongs to the role maker" in str(refused[0])


def test_a_schema_of_a_role_that_ours_is_a_member_of_or_of_a_superuser_is_used(
    database: str, ours: str, admin: Session
) -> None:
    admin.execute("grant maker to cdc_state")
    admin.execute(f"create schema {SCHEMA} authorization maker".encode())
    opened(ours).close()
    assert checked(ours) == {}
    # A superuser is a member of every role only in what it may do.
    assert "coordination_foreign" in checked(database)
    admin.execute(f"drop schema {SCHEMA} cascade")
    opened(database).close()
    admin.execute(
        f"grant usage on schema {SCHEMA} to cdc_state;"
        f" grant select, insert, update, delete on all tables in schema {SCHEMA} to cdc_state"
    )
    opened(ours).close()
    assert checked(ours) == {}


def test_a_role_whose_rights_ours_neither_has_nor_may_take_is_not_trusted(
    ours: str, admin: Session
) -> None:
    """A membership with neither, since 16, is only the right to grant it."""
    admin.execute("grant maker to cdc_state with admin true, inherit false, set false")
    admin.execute(f"create schema {SCHEMA} authorization maker".encode())
    assert "coordination_foreign" in checked(ours)
    with pytest.raises(CoordinationError, match="belongs to the role maker"):
        opened(ours)
    admin.execute("grant maker to cdc_state with set true")
    assert "coordination_foreign" not in checked(ours)


@pytest.mark.parametrize("granted", ["the schema", "the tables"])
def test_who_may_change_our_tables_by_a_group_is_named(
    ours: str, admin: Session, granted: str
) -> None:
    opened(ours).close()
    admin.execute("create role readers; grant readers to maker")
    try:
        schema, tables = ("readers", "maker") if granted == "the schema" else ("maker", "readers")
        admin.execute(
            f"grant usage on schema {SCHEMA} to {schema};"
            f" grant delete on all tables in schema {SCHEMA} to {tables}".encode()
        )
        assert f"{tables} may change" in checked(ours)["coordination_shared"].message
    finally:
        admin.execute("drop owned by readers; drop role readers")


def test_a_schema_that_an_administrator_made_for_us_is_given_to_us(
    database: str, ours: str, admin: Session, maker: Session
) -> None:
    """As earlier versions took it: he is no superuser, and nothing in it runs with our rights."""
    maker.execute(f"create schema {SCHEMA}; grant usage, create on schema {SCHEMA} to cdc_state")
    with psycopg.connect(ours, autocommit=True) as before:
        before.execute(f"create table {SCHEMA}.kept (id int primary key)".encode())
    maker.execute(f"create table {SCHEMA}.his (id int primary key)".encode())
    with pytest.raises(CoordinationError, match="belongs to the role maker") as refused:
        opened(ours)
    assert "grant" not in refused.value.remedy
    admin.execute(refused.value.remedy.partition("made it: ")[2].encode())
    opened(ours).close()
    assert checked(ours) == {}
    # What a third role has there is nobody's to give.
    admin.execute(f"create table {SCHEMA}.x (); alter table {SCHEMA}.x owner to stranger")
    admin.execute(f"alter schema {SCHEMA} owner to maker".encode())
    assert "owner to" not in checked(ours)["coordination_foreign"].remedy


PLANTED = {
    "function set_lock": "create function {s}.set_lock(int) returns int language sql as 'select 1'",
    "view": "create view {s}.jobs as select 1 as one",
    "table": "create table {s}.next_version (id int)",
    "type": "create type {s}.lsn as (a int)",
    "operator": "create operator {s}.= (leftarg = text, rightarg = text, function = texteq)",
    "collation": 'create collation {s}.own (locale = "C")',
}


@pytest.mark.parametrize("what", PLANTED)
def test_what_others_have_put_into_our_schema_is_named_and_nothing_begins(
    ours: str, admin: Session, maker: Session, what: str
) -> None:
    opened(ours).close()
    admin.execute(f"grant usage, create on schema {SCHEMA} to maker".encode())
    maker.execute(PLANTED[what].format(s=SCHEMA).encode())
    admin.execute(f"revoke create on schema {SCHEMA} from maker".encode())
    with pytest.raises(CoordinationError, match=rf"{what.split(maxsplit=1)[0]} .*of maker"):
        opened(ours)
    assert checked(ours)["coordination_planted"].severity == "error"
    admin.execute("drop owned by maker cascade")
    opened(ours).close()


IN_OUR_TABLES = {
    "trigger t on table _pg2iceberg.pins": "create trigger t before insert on {s}.pins"
    " for each row execute function public.bite_trigger()",
    "rule r on table _pg2iceberg.pins": "create rule r as on insert to {s}.pins do also"
    " insert into public.canary values ('x')",
    "policy p on table _pg2iceberg.pins": "create policy p on {s}.pins using (public.bite())",
    "function public.bite() in table _pg2iceberg.pins": "alter table {s}.pins alter released_at"
    " set default case when public.bite() then now() end",
    "function public.bite() in table _pg2iceberg.claims": "alter table {s}.claims"
    " add check (public.bite())",
    "function public.still(uuid) in table _pg2iceberg.pins": "create index on {s}.pins"
    " (public.still(pin))",
    "type public.mood in table _pg2iceberg.sessions": "create type public.mood as enum ('sad');"
    " alter table {s}.sessions add column mood public.mood",
    "on table _pg2iceberg.pins": "create table public.refers (pin uuid references {s}.pins)",
}


@pytest.mark.parametrize("what", IN_OUR_TABLES)
def test_code_in_our_own_tables_that_no_migration_made_is_named_and_nothing_begins(
    ours: str, admin: Session, what: str
) -> None:
    """As it is there after a schema that somebody else made was given to us."""
    opened(ours).close()
    admin.execute(CANARY)
    admin.execute("create function still(uuid) returns int language sql immutable as 'select 1'")
    admin.execute(IN_OUR_TABLES[what].format(s=SCHEMA).encode())
    with pytest.raises(CoordinationError) as refused:
        opened(ours)
    assert what in str(refused.value).replace('"', "")
    assert what in checked(ours)["coordination_planted"].message
    assert admin.execute("select * from canary").fetchall() == []


@pytest.mark.parametrize("whom", ["maker", "public"])
def test_who_may_put_code_into_our_schema_is_named_and_nothing_begins(
    ours: str, admin: Session, whom: str
) -> None:
    opened(ours).close()
    for grant in ("create on schema", "trigger on all tables in schema"):
        admin.execute(f"grant usage on schema {SCHEMA} to {whom}".encode())
        admin.execute(f"grant {grant} {SCHEMA} to {whom}".encode())
        with pytest.raises(CoordinationError, match=r"(maker|PUBLIC) may put code"):
            opened(ours)
        finding = checked(ours)["coordination_open"]
        with psycopg.connect(ours, autocommit=True) as owner:
            owner.execute(finding.remedy.encode())
        opened(ours).close()
        assert "coordination_open" not in checked(ours)


def test_who_may_change_our_tables_is_named(ours: str, admin: Session) -> None:
    opened(ours).close()
    admin.execute(f"grant select, delete on all tables in schema {SCHEMA} to maker".encode())
    assert checked(ours) == {}  # without the schema it can't
    admin.execute(f"grant usage on schema {SCHEMA} to maker".encode())
    finding = checked(ours)["coordination_shared"]
    assert (finding.severity, "maker may change" in finding.message) == ("warning", True)
    opened(ours).close()
    with psycopg.connect(ours, autocommit=True) as owner:
        owner.execute(finding.remedy.encode())
    assert checked(ours) == {}


def test_every_version_of_postgres_can_be_asked(any_postgres_dsn: NewDatabase) -> None:
    dsn = any_postgres_dsn()
    one, other = opened(dsn), opened(dsn)
    one.lock("pins")
    assert not other.lock_within("pins", 1.5)
    other.forget_locks()
    assert other.lock_holder("pins") == one.connection.info.backend_pid
    one.connection.execute(
        f"create function bite() returns bool language sql as 'select true';"
        f" alter table {SCHEMA}.pins add check ({SCHEMA}.bite());"
        f" grant create on schema {SCHEMA} to public".encode()
    )
    assert set(checked(dsn)) == {"coordination_planted", "coordination_open"}
    one.close()
    wait_for(lambda: other.try_lock("pins"))
    other.close()


# --- where names are found ---


def test_a_session_of_the_log_finds_names_in_postgres_first_then_in_our_schema_and_nowhere_else(
    ours: str, admin: Session
) -> None:
    admin.execute(
        "grant create on schema public to cdc_state;"
        " alter role cdc_state set search_path = public, pg_catalog"
    )
    opened(ours).close()
    for schema in ("public", SCHEMA):
        admin.execute(
            f"create function {schema}.now() returns timestamptz language sql"
            " as 'select null::timestamptz'"
        )
    admin.execute("create table public.elsewhere (id int)")
    store = opened(ours)
    for session in (store.connection, connect_log(config_of(ours), "report")):
        row = session.execute(
            "select current_schemas(true)::text[], now() is null, to_regclass('elsewhere')"
        ).fetchone()
        assert row == (["pg_catalog", SCHEMA], False, None)
        # Not even a temporary table of its own comes first.
        session.execute("create temporary table pins (id int); create temporary table pg_class ()")
        row = session.execute(
            "select 'pins'::regclass::text, 'pg_class'::regclass::text"
        ).fetchone()
        assert row == ("pins", "pg_class")
        found = session.execute("select count(*) > 0 from pg_class").fetchone()
        assert found == (True,)
        session.execute("select consistent_point from pins")
        session.close()


def test_the_catalog_is_looked_for_in_our_schema_alone(
    ours: str, admin: Session, maker: Session, tmp_home: Path
) -> None:
    admin.execute("grant create on schema public to maker")
    maker.execute(
        "create table public.iceberg_tables (catalog_name text, table_namespace text,"
        " table_name text, metadata_location text);"
        " insert into public.iceberg_tables values ('lake', 'src', 't', 'file:///etc');"
        " grant all on public.iceberg_tables to public"
    )
    config = config_of(ours)
    catalog_place._found.cache_clear()
    assert catalog_schema(config) == SCHEMA
    catalog = open_catalog(config)
    assert catalog.list_namespaces() == []
    with catalog.engine.connect() as connection:  # type: ignore[attr-defined]
        path = connection.exec_driver_sql("show search_path").scalar()
    assert path == f'"{SCHEMA}",pg_temp'
    options = '-c search_path="_pg2iceberg",pg_temp'
    assert options in spark_settings(config)["spark.sql.catalog.lake.jdbc.options"]
