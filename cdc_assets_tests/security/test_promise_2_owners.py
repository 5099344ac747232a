"""Promise 2: whoever owns tables at the source gains nothing but his own rows.

Mallory owns the replicated tables. Wherever SQL lets an owner plant a function she does, and each
says in the server's log who called it. Every command runs, and none of ours did.
"""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from psycopg import sql

from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.maintenance.run import maintain
from cdc_assets.materializer.reread import rereader
from cdc_assets.messages.findings import Finding
from cdc_assets.observe.status import collect
from cdc_assets.operations.drop import drop_source
from cdc_assets.operations.running import flushing
from cdc_assets.postgres.comments import comments, described
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.session.connect import connect
from cdc_assets.readiness.source.server import preflight
from cdc_assets.verify.representable import unrepresentable
from cdc_assets.verify.sample import sample
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.security.roles import ROLES, apply_roles, dropped_after, dsn_of
from cdc_assets_tests.support.lake import Lake, lake

pytestmark = [pytest.mark.spark]

MALLORY = """
create role mallory;
grant create on schema public to mallory;
grant create on database {} to mallory;
create schema hers authorization mallory;
set role mallory;
create type hers.mood as enum ('sad', 'glad');
create type hers.pair as (a int, b hers.mood);
"""
# Of whatever a statement of ours may call without a schema, one that fits better than Postgres's.
PLANTED = """
create function hers.called(what text) returns void language plpgsql as
    $$ begin raise log 'PLANTED % by %', what, current_user; end $$;
create function hers.shown(v hers.mood) returns text language plpgsql immutable as
    $$ begin perform hers.called('cast to text'); return 'shown'; end $$;
create function hers.read(v text) returns hers.mood language plpgsql immutable as
    $$ begin perform hers.called('cast from text'); return null; end $$;
create cast (hers.mood as text) with function hers.shown as implicit;
create cast (text as hers.mood) with function hers.read as implicit;
create function hers.shown(v hers.pair) returns text language plpgsql immutable as
    $$ begin perform hers.called('cast of a row'); return 'shown'; end $$;
create cast (hers.pair as text) with function hers.shown(hers.pair) as implicit;
create function hers.valid(v int) returns bool language plpgsql immutable as
    $$ begin perform hers.called('domain'); return true; end $$;
create domain hers.positive as int check (hers.valid(value));
create function hers.equal(a oid, b bigint) returns bool language plpgsql immutable as
    $$ begin perform hers.called('operator'); return false; end $$;
create operator public.= (leftarg = oid, rightarg = bigint, function = hers.equal);
create function hers.equal(a name, b text) returns bool language plpgsql immutable as
    $$ begin perform hers.called('operator'); return false; end $$;
create operator public.= (leftarg = name, rightarg = text, function = hers.equal);
create function hers.equal(a hers.mood, b hers.mood) returns bool language plpgsql immutable as
    $$ begin perform hers.called('operator of her type'); return true; end $$;
create operator public.= (leftarg = hers.mood, rightarg = hers.mood, function = hers.equal);
create operator hers.= (leftarg = hers.mood, rightarg = hers.mood, function = hers.equal);
create function public.format(f text, v hers.mood) returns text language plpgsql as
    $$ begin perform hers.called('function format'); return 'shown'; end $$;
create function public.quote_ident(v name) returns text language plpgsql as
    $$ begin perform hers.called('function quote_ident'); return v; end $$;
create function public.pg_export_snapshot(v int default 1) returns text language plpgsql as
    $$ begin perform hers.called('function pg_export_snapshot'); return ''; end $$;
create function public.pg_drop_replication_slot(v text) returns void language plpgsql as
    $$ begin perform hers.called('function pg_drop_replication_slot'); end $$;
create schema cdc_source;
create view cdc_source.pg_class as select hers.called('view')::text as relname;
create view public.pg_publication as select hers.called('view')::text as pubname;
grant usage on schema cdc_source, hers to public;
"""
TABLES = """
create table hers.t (
    id int, kind hers.mood, parts hers.positive[], primary key (id, kind, parts),
    one hers.pair, many hers.mood[], n hers.positive, v text default hers.noted('default'),
    at timestamp, more text generated always as (hers.noted('generated')) stored,
    check (hers.fine(v)));
create index on hers.t (hers.changed(v)) where hers.fine(v);
create statistics hers.known on (hers.changed(v)), id from hers.t;
create trigger t before insert or update or delete on hers.t
    for each row execute function hers.triggered();
create table hers.hidden (id int primary key, v text);
alter table hers.hidden enable row level security;
create policy p on hers.hidden using (hers.fine(v));
insert into hers.t (id, kind, parts, one, many, n, v, at)
select g, 'glad', array[g], pg_catalog.format('(%s,sad)', g)::hers.pair, '{sad,glad}', g, 'v' || g,
       'infinity'
  from generate_series(1, 50) g;
insert into hers.hidden values (1, 'x');
"""
OF_TABLES = """
create function hers.noted(what text) returns text language plpgsql immutable as
    $$ begin perform hers.called(what); return what; end $$;
create function hers.fine(v text) returns bool language plpgsql immutable as
    $$ begin perform hers.called('condition'); return true; end $$;
create function hers.changed(v text) returns text language plpgsql immutable as
    $$ begin perform hers.called('index'); return v; end $$;
create function hers.triggered() returns trigger language plpgsql as
    $$ begin perform hers.called('trigger'); return case tg_op when 'DELETE' then old else new end;
    end $$;
"""
T = TableId("hers", "t")


@pytest.fixture
def owned(postgres: EmbeddedPostgres, postgres_dsn: NewDatabase) -> Iterator[str]:
    """The administrator's DSN of a database in which Mallory has planted what she can."""
    dsn = postgres_dsn()
    with dropped_after(dsn, "mallory"), psycopg.connect(dsn, autocommit=True) as administrator:
        database = sql.Identifier(administrator.info.dbname)
        administrator.execute(sql.SQL(MALLORY).format(database))
        for statements in (PLANTED, OF_TABLES, TABLES):
            administrator.execute(statements.encode())
        administrator.execute("reset role")
        apply_roles(postgres, dsn, "hers.t; hers.hidden")
        yield dsn


def _calls(postgres: EmbeddedPostgres, since: int) -> set[str]:
    """What of hers was called with rights of ours."""
    with postgres.log_path.open("rb") as log:
        log.seek(since)
        lines = log.read().decode().splitlines()
    said = [line.partition("PLANTED ")[2] for line in lines if "PLANTED " in line]
    return {line for line in said if line.rpartition(" by ")[2] in {*ROLES, "postgres"}}


def _found(opened: Lake) -> list[Finding]:
    with opened.pipeline.connect_source("check") as source:
        return preflight(source, opened.config, opened.pipeline.store)


def _every_command(opened: Lake) -> None:
    pipeline, session = opened.pipeline, opened.session
    _found(opened)
    opened.pin()
    opened.copy()
    opened.catch_up()
    row = pipeline.store.table(T)
    assert row is not None
    assert all(found.equal for found in opened.verify())
    with flushing(opened.config):
        found = sample(pipeline, session, T, 1000)
    assert (found.rows, found.looked_up, found.differing) == (50, 50, 0), found.skipped
    reread = rereader(pipeline, opened.lake_table(T), frozenset)
    (piece,) = reread([("1", "glad", "{1}"), ("2", "glad", "{2}")])
    assert len(piece.found) == 2
    assert unrepresentable(pipeline, session, opened.lake_table(T)) == {"at": 50}
    with pipeline.connect_source("comments") as source:
        comments(source, row.oid)
        described(source, [T])
    collect(pipeline)


def test_promise_2_nothing_that_an_owner_planted_is_called_with_our_rights(
    postgres: EmbeddedPostgres, owned: str, spark_server: SparkServer, tmp_home: object
) -> None:
    settings = {
        "postgres": {
            "dsn": dsn_of(owned, "cdc_source"),
            "replication_dsn": dsn_of(owned, "cdc_replication"),
        },
        "state": {"postgres_url": dsn_of(owned, "cdc_state")},
    }
    since = postgres.log_path.stat().st_size
    with lake(
        dsn_of(owned, "cdc_source"),
        spark_server.ensure(),
        "select",
        "hers.t",
        "hers.hidden",
        **settings,
    ) as opened:
        opened.tables = [T]  # the other one is refused
        _every_command(opened)
        with psycopg.connect(owned, autocommit=True) as administrator:
            administrator.execute(
                b"set role mallory; update hers.t set v = 'w', kind = 'sad' where id < 5;"
                b" delete from hers.t where id = 9; alter table hers.t add column late text"
                b" default clock_timestamp()::text; update hers.t set v = 'x' where id = 7"
            )
        opened.catch_up()
        assert all(found.equal for found in opened.verify())
        (done,) = maintain(opened.pipeline, lambda: opened.session, [T])
        assert done.problem is None
        row = opened.row(TableId("hers", "hidden"))
        assert "row-level security" in str(row.reason)
        codes = {f.code for f in _found(opened)}
        assert "excess_rights" not in codes and "row_security" in codes
        assert _calls(postgres, since) == set()
        [said] = drop_source(opened.pipeline).refused
        assert "somebody else's" in said
    assert _calls(postgres, since) == set()


def test_promise_2_check_names_every_excess_of_rights(
    postgres: EmbeddedPostgres, owned: str, spark_server: SparkServer, tmp_home: object
) -> None:
    settings = {"state": {"postgres_url": dsn_of(owned, "cdc_state")}}
    with (
        psycopg.connect(owned, autocommit=True) as administrator,
        lake(
            dsn_of(owned, "cdc_source"), spark_server.ensure(), "select", "hers.t", **settings
        ) as opened,
    ):

        def said() -> str:
            return " ".join(f.message for f in _found(opened) if f.code == "excess_rights")

        assert "may read what isn't replicated here: hers.hidden" in said()
        administrator.execute("revoke select on hers.hidden from cdc_source")
        assert said() == ""
        for right, words in (
            ("alter role cdc_source replication", "may replicate"),
            ("alter role cdc_source createrole", "may create roles"),
            ("alter role cdc_source createdb", "may create databases"),
            ("alter role cdc_source bypassrls", "bypasses row-level security"),
            ("grant mallory to cdc_source", "may become the owner of, hers.t"),
            ("grant update (v) on hers.t to cdc_source", "may write to hers.t"),
            ("grant pg_execute_server_program to cdc_source", "pg_execute_server_program"),
            ("alter role cdc_source superuser", "is a superuser"),
        ):
            administrator.execute(right.encode())
            assert words in said(), right
        codes = {f.code for f in _found(opened)}
        assert "event_trigger" not in codes
        administrator.execute(
            b"create function hers.ddl() returns event_trigger language plpgsql as"
            b" $$ begin end $$; alter function hers.ddl() owner to mallory;"
            b" create event trigger planted on ddl_command_start execute function hers.ddl()"
        )
        named = [f.message for f in _found(opened)]
        assert any("planted" in message and "mallory" in message for message in named)


def test_promise_2_what_planning_calls_has_the_rights_of_reading_alone(
    postgres: EmbeddedPostgres, owned: str, tmp_home: object
) -> None:
    """Postgres calls a constant function of an index when it plans: stated, as nothing helps."""
    with psycopg.connect(owned, autocommit=True) as administrator:
        administrator.execute(
            "set role mallory; create function hers.one(v int) returns int language plpgsql"
            " immutable as $$ begin perform hers.called(pg_catalog.format('planning, %s, %s',"
            " pg_catalog.current_setting('is_superuser'), (select rolreplication"
            " from pg_catalog.pg_roles where rolname = current_user)));"
            " return v; end $$; create index on hers.t ((id + hers.one(1)))"
        )
    since = postgres.log_path.stat().st_size
    with connect(dsn_of(owned, "cdc_source")) as source:
        source.execute("select count(*) from only hers.t where ctid < '(5,0)'")
    assert _calls(postgres, since) == {"planning, off, f by cdc_source"}
