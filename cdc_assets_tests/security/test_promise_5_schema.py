"""Promise 5: a schema that isn't ours alone is refused or named."""

from __future__ import annotations

import threading
from pathlib import Path

import psycopg
import pytest

from cdc_assets.errors import CoordinationError
from cdc_assets.lake.catalog.catalog import open_catalog, tried
from cdc_assets.log.store import LogStore
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.security.coordination import SCHEMA, Session, checked, config_of, of, opened
from cdc_assets_tests.support.waiting import wait_for

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
