"""What a source can do to a copy: hide rows, leave columns out, end sessions, rewrite tables.

Whatever it is, a copy that isn't whole is never called complete, and other tables don't notice.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.errors import CopyRestarted, SlotBusy, TableProblem
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.log.copies.chunks import chunks
from cdc_assets.log.tables import TableRow
from cdc_assets.pins import pins
from cdc_assets.postgres import slots as replication
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.publications import GENERATED_COLUMNS
from cdc_assets.postgres.session.connect import connect
from cdc_assets.postgres.slots import NewSlot, create_slot
from cdc_assets.readiness.source.server import preflight
from cdc_assets.snapshot.coordinator import copy_table
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.lake_support import Lake, lake

pytestmark = pytest.mark.spark

T, U = TableId("public", "t"), TableId("public", "u")
PAIR = """
create table t (id int primary key, v text not null);
insert into t select i, 'old ' || i from generate_series(1, 1000) i;
create table u as table t;
alter table u add primary key (id);
"""
ODD = TableId("My.Schema", "we ird/ta'ble%\"x – ü")


def state(source: Lake, table: TableId) -> TableRow:
    row = source.pipeline.store.table(table)
    assert row is not None
    return row


def equal(source: Lake, table: TableId, columns: str = "*") -> bool:
    there = source.execute(f"select {columns} from {table}")
    return source.rows(table) == sorted(there, key=repr)


def catch_up(source: Lake, *tables: TableId) -> None:
    source.flush()
    for table in tables or source.tables:
        source.drain(table)


@contextmanager
def role(dsn: str, *settings: str) -> Iterator[tuple[str, str]]:
    """``(name, dsn)`` of a role that replicates and is no superuser; it owns what it makes."""
    name, password = f"test_{secrets.token_hex(4)}", secrets.token_hex(8)
    parts = conninfo_to_dict(dsn)
    with psycopg.connect(dsn, autocommit=True) as superuser:
        superuser.execute("set lock_timeout = '20s'")
        who = sql.Identifier(name)
        superuser.execute(
            sql.SQL("create role {} login replication password {}").format(who, password)
        )
        superuser.execute(
            sql.SQL("grant create on database {} to {}").format(
                sql.Identifier(str(parts["dbname"])), who
            )
        )
        superuser.execute(sql.SQL("grant create on schema public to {}").format(who))
        for setting in settings:
            superuser.execute(b"alter role %s set %s" % (name.encode(), setting.encode()))
        try:
            address = f"{parts['host']}:{parts['port']}/{parts['dbname']}"
            yield name, f"postgresql://{name}:{password}@{address}"
        finally:
            superuser.execute(
                "select pg_terminate_backend(pid, 5000) from pg_stat_activity where usename = %s",
                [name],
            )
            superuser.execute(sql.SQL("drop owned by {} cascade").format(who))
            superuser.execute(sql.SQL("drop role {}").format(who))


# --- rows that the role doesn't see ---


@pytest.mark.parametrize(
    ("rights", "reason", "remedy"),
    [
        (
            'grant select on t to "{role}"; alter table t enable row level security;',
            "row-level security hides rows of public.t from the role {role}",
            'alter role "{role}" bypassrls',
        ),
        ("", "the role {role} may not read public.t", 'grant select on public.t to "{role}"'),
    ],
    ids=["row-level security", "no select"],
)
def test_a_table_that_the_role_does_not_see_whole_is_parked(
    postgres_dsn: NewDatabase,
    spark_server: SparkServer,
    tmp_home: Path,
    rights: str,
    reason: str,
    remedy: str,
) -> None:
    dsn = postgres_dsn()
    with (
        role(dsn) as (name, role_dsn),
        lake(
            dsn,
            spark_server.ensure(),
            PAIR + rights.format(role=name) + f"alter table u owner to {name};",
            "t",
            "u",
            postgres={"dsn": role_dsn},
            state={"postgres_url": dsn},
        ) as source,
    ):
        source.pin()
        parked = state(source, T)
        assert parked.state == "parked"
        assert reason.format(role=name) in str(parked.reason)
        assert remedy.format(role=name) in str(parked.reason)
        with connect(role_dsn) as connection:
            errors = {f.code for f in preflight(connection, source.config) if f.severity == "error"}
        assert errors & {"row_security", "select_privilege"}
        copy_table(source.pipeline, source.session, U)
        source.execute("update u set v = 'new' where id = 1")
        catch_up(source, U)
        assert equal(source, U)


def test_row_level_security_that_comes_on_during_the_copy_hides_nothing_silently(
    postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path
) -> None:
    dsn = postgres_dsn()
    with (
        role(dsn) as (name, role_dsn),
        lake(
            dsn,
            spark_server.ensure(),
            f"{PAIR} alter table t owner to {name}; alter table u owner to {name};",
            {"name": "t", "chunk_pages": 1},
            "u",
            postgres={"dsn": role_dsn},
            state={"postgres_url": dsn},
        ) as source,
    ):
        source.pin()
        keys = [chunk.key for chunk in chunks(source.pipeline.store, T, 1)]
        copy_table(source.pipeline, source.session, T, only=keys[:1])
        source.execute(
            "alter table t enable row level security; alter table t force row level security"
        )
        with pytest.raises(TableProblem, match="row-level security"):
            copy_table(source.pipeline, source.session, T)
        assert state(source, T).state != "streaming"
        source.execute("alter table t disable row level security")
        source.copy()
        catch_up(source)
        assert equal(source, T)
        assert equal(source, U)


# --- publications made by hand ---


@pytest.mark.parametrize(
    ("tables", "options", "reason"),
    [
        ("t where (id > 5), u", "publish_via_partition_root = true", "has a row filter"),
        ("t (id), u", "publish_via_partition_root = true", "has a column list"),
        (
            "t, u",
            "publish = 'insert', publish_via_partition_root = true",
            "doesn't publish every kind of change",
        ),
        ("t, u", "publish_via_partition_root = false", "as those of the partitions"),
    ],
    ids=["row filter", "column list", "only inserts", "partitions"],
)
def test_a_publication_that_leaves_something_out_parks_the_table_until_it_is_mended(
    any_postgres_dsn: NewDatabase,
    spark_server: SparkServer,
    tmp_home: Path,
    tables: str,
    options: str,
    reason: str,
) -> None:
    setup = """
    create table t (id int primary key, v text not null) partition by range (id);
    create table t_low partition of t for values from (0) to (500);
    create table t_high partition of t for values from (500) to (5000);
    insert into t select i, 'old ' || i from generate_series(1, 1000) i;
    create table u (id int primary key);
    """
    with lake(
        any_postgres_dsn(),
        spark_server.ensure(),
        f"{setup} create publication cdc_src for table {tables} with ({options});",
        "t",
        "u",
    ) as source:
        found = {f.code: f for f in preflight(source.source, source.config)}
        assert reason in found["table_partial"].message
        source.pin()
        parked = state(source, T)
        assert parked.state == "parked"
        assert reason in str(parked.reason)
        way_out = re.search(r"alter publication [^;]*", str(parked.reason))
        assert way_out is not None, "the remedy can be pasted"
        source.execute(way_out[0].rstrip("."))
        source.pin()
        source.copy()
        source.execute("update t set v = 'new' where id in (1, 999)")
        source.execute("delete from t where id in (2, 998)")
        source.execute("insert into u values (1)")
        catch_up(source)
        assert equal(source, T)
        assert equal(source, U)


# --- generated columns ---


def test_generated_columns_are_in_the_lake_where_postgres_sends_them(
    any_postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path
) -> None:
    dsn = any_postgres_dsn()
    with psycopg.connect(dsn) as connection:
        sends = connection.info.server_version >= GENERATED_COLUMNS
    virtual = ", virt int generated always as (n + 1) virtual" if sends else ""
    setup = f"""
    create table t (
        id int primary key, n int, stored int generated always as (n * 2) stored{virtual}
    );
    insert into t select i, i from generate_series(1, 1000) i;
    """
    with lake(dsn, spark_server.ensure(), setup, "t") as source:
        named = [
            f.message
            for f in preflight(source.source, source.config)
            if f.code == "generated_columns"
        ]
        assert len(named) == 1
        assert ("(virt)" if sends else "(stored)") in named[0]
        source.pin()
        source.execute("update t set n = -n where id % 10 = 0")
        source.copy()
        source.execute("update t set n = 7 where id % 15 = 0")
        catch_up(source)
        assert equal(source, T, "id, n, stored" if sends else "id, n")
        assert source.verify()[0].equal


def test_a_publication_without_generated_columns_leaves_them_out_of_the_copy_too(
    postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path
) -> None:
    setup = """
    create table t (id int primary key, n int, stored int generated always as (n * 2) stored);
    insert into t select i, i from generate_series(1, 1000) i;
    create publication cdc_src for table t;
    """
    with lake(postgres_dsn(), spark_server.ensure(), setup, "t") as source:
        findings = preflight(source.source, source.config)
        assert "generated_columns" in {finding.code for finding in findings}
        source.pin()
        source.execute("update t set n = -n where id % 10 = 0")
        source.copy()
        catch_up(source)
        assert equal(source, T, "id, n")


# --- time-outs of the role ---


def test_the_time_outs_of_the_role_end_neither_pin_nor_copy_nor_stream(
    any_postgres_dsn: NewDatabase,
    spark_server: SparkServer,
    tmp_home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def slow(dsn: str, slot: str, *, temporary: bool) -> NewSlot:
        made = create_slot(dsn, slot, temporary=temporary)
        time.sleep(1.5)  # as planning many tables would
        return made

    monkeypatch.setattr(pins, "create_slot", slow)
    dsn = any_postgres_dsn()
    settings = [
        "statement_timeout = '1ms'",
        "lock_timeout = '1ms'",
        "idle_in_transaction_session_timeout = '1s'",
        "idle_session_timeout = '1s'",
    ]
    with psycopg.connect(dsn, autocommit=True) as held:
        if held.info.server_version >= 170000:
            settings.append("transaction_timeout = '1s'")
        with (
            role(dsn, *settings) as (name, role_dsn),
            lake(
                dsn,
                spark_server.ensure(),
                f"{PAIR} alter table t owner to {name}; alter table u owner to {name};",
                {"name": "t", "chunk_pages": 1},
                "u",
                postgres={"dsn": role_dsn},
            ) as source,
        ):
            # Slot creation waits for this writer, longer than each of the time-outs.
            with ended_later(held, "update u set v = 'meanwhile' where id = 1", 2.0):
                source.pin()
            time.sleep(3.0)
            source.execute("update t set v = 'new' where id % 3 = 0")
            # A task waits for this lock, and its claims are idle meanwhile.
            with ended_later(held, "lock table t in access exclusive mode", 2.5):
                source.copy()
            assert len(source.rows(T)) == 1000
            assert {row.epoch for row in source.pipeline.store.tables()} == {1}
            catch_up(source)
            assert equal(source, T)
            assert equal(source, U)


@contextmanager
def ended_later(held: psycopg.Connection[Any], statement: str, seconds: float) -> Iterator[None]:
    """A transaction of somebody else's that ``statement`` is in, committed after some seconds."""

    def end() -> None:
        time.sleep(seconds)
        held.execute("commit")

    held.execute("begin")
    held.execute(statement.encode())
    ending = threading.Thread(target=end)
    ending.start()
    try:
        yield
    finally:
        ending.join()


# --- tables that change shape while they are copied ---

LARGE = """
create table t (id int primary key, v text not null, pad text);
insert into t select i, 'old ' || i, repeat('x', 100) from generate_series(1, 20000) i;
create index t_v on t (v);
-- Room that only VACUUM FULL gives back: it moves rows into pages that were copied already.
delete from t where id % 4 = 0;
create table u as table t;
alter table u add primary key (id);
"""


@pytest.fixture
def large(postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path) -> Iterator[Lake]:
    with lake(
        postgres_dsn(),
        spark_server.ensure(),
        LARGE,
        {"name": "t", "chunk_pages": 16},
        {"name": "u", "chunk_pages": 16},
    ) as opened:
        yield opened


@pytest.mark.parametrize(
    "events",
    [
        ["truncate t", "insert into t values (1, 'only', null)"],
        ["delete from t where id % 2 = 0", "vacuum full t"],
        ["update t set v = 'x' || id where id % 2 = 0", "cluster t using t_v"],
        [
            "drop table t",
            "create table t (id int primary key, v text not null, pad text)",
            "insert into t select i, 'another', null from generate_series(1, 500) i",
        ],
        [
            "alter table t rename to t_old",
            "create table t (v date, id bigint primary key)",
            "insert into t select '2024-01-01', i from generate_series(1, 500) i",
        ],
        ["alter table t drop column pad"],
        ["alter table t alter v type varchar(50), alter id type bigint"],
    ],
    ids=[
        "truncate",
        "vacuum full",
        "cluster",
        "recreated",
        "replaced by another",
        "column dropped",
        "types changed",
    ],
)
def test_a_table_that_is_rewritten_while_it_is_copied_ends_as_the_source_has_it(
    large: Lake, events: list[str]
) -> None:
    source = large
    source.pin()
    keys = [chunk.key for chunk in chunks(source.pipeline.store, T, 1)]
    copy_table(source.pipeline, source.session, T, only=keys[:2])
    for event in events:
        source.execute(event)
    try:
        copy_table(source.pipeline, source.session, T)
    except CopyRestarted:
        assert state(source, T).state == "waiting"
        source.pin()
        copy_table(source.pipeline, source.session, T)
        assert state(source, T).epoch == 2
    copy_table(source.pipeline, source.session, U)
    assert state(source, U).epoch == 1, "nothing happened to the other table"
    source.execute("update t set id = id + 100000 where id % 7 = 0")
    catch_up(source)
    assert equal(source, T)
    assert equal(source, U)


def test_a_table_that_is_dropped_while_it_is_copied_is_parked(large: Lake) -> None:
    source = large
    source.pin()
    keys = [chunk.key for chunk in chunks(source.pipeline.store, T, 1)]
    copy_table(source.pipeline, source.session, T, only=keys[:2])
    source.execute("drop table t")
    with pytest.raises(TableProblem, match="not found in the source"):
        copy_table(source.pipeline, source.session, T)
    assert state(source, T).state == "parked"
    assert "not found in the source" in str(state(source, T).reason)
    copy_table(source.pipeline, source.session, U)
    catch_up(source, U)
    assert equal(source, U)


def test_a_table_that_is_rewritten_between_its_snapshot_and_its_plan_is_copied_anew(
    large: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rewritten_meanwhile(dsn: str, slot: str, *, temporary: bool) -> NewSlot:
        made = create_slot(dsn, slot, temporary=temporary)
        if not temporary:  # rows that ALTER TABLE wrote are invisible to older snapshots
            large.execute("alter table t alter id type bigint")
        return made

    monkeypatch.setattr(pins, "create_slot", rewritten_meanwhile)
    large.pin()
    with pytest.raises(CopyRestarted):
        copy_table(large.pipeline, large.session, T)
    large.pin()
    large.copy()
    catch_up(large)
    assert equal(large, T)
    assert equal(large, U)


def test_a_table_that_is_altered_while_its_pin_waits_is_described_anew(
    large: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def altered_meanwhile(dsn: str, slot: str, *, temporary: bool) -> NewSlot:
        if not temporary:  # what slot creation waits for may be a migration
            large.execute("alter table t drop column pad, alter id type bigint, add extra int")
        return create_slot(dsn, slot, temporary=temporary)

    monkeypatch.setattr(pins, "create_slot", altered_meanwhile)
    large.pins.prepare()
    assert state(large, T).state == "waiting"
    assert state(large, U).state == "copying"
    large.pin()
    large.copy()
    catch_up(large)
    assert equal(large, T)
    assert equal(large, U)


# --- slot creation that is held up ---


def test_a_pin_that_is_held_up_names_the_transaction_and_comes_after_it(
    postgres_dsn: NewDatabase,
    spark_server: SparkServer,
    tmp_home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replication, "SLOT_PATIENCE_SECONDS", 2)
    dsn = postgres_dsn()
    with (
        lake(dsn, spark_server.ensure(), PAIR, "t") as source,
        psycopg.connect(dsn, application_name="nightly report") as writer,
    ):
        writer.execute("update t set v = 'late' where id = 1")
        with pytest.raises(SlotBusy) as busy:
            source.pin()
        assert f"process {writer.info.backend_pid} (nightly report, role postgres)" in str(
            busy.value
        )
        writer.commit()
        source.pin()
        source.copy()
        assert equal(source, T)


def test_a_pin_that_a_prepared_transaction_holds_up_names_it(
    public_directory: Path,
    spark_server: SparkServer,
    tmp_home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replication, "SLOT_PATIENCE_SECONDS", 2)
    settings = {"fsync": "off", "max_prepared_transactions": "2"}
    with (
        EmbeddedPostgres(public_directory / "prepared", settings=settings) as server,
        lake(server.start(), spark_server.ensure(), PAIR, "t") as source,
    ):
        source.execute("begin")
        source.execute("update t set v = 'late' where id = 1")
        source.execute("prepare transaction 'forgotten'")
        with pytest.raises(SlotBusy, match="prepared transaction 'forgotten' \\(postgres\\)"):
            source.pin()
        source.execute("rollback prepared 'forgotten'")
        source.pin()
        source.copy()
        assert equal(source, T)


# --- sizes and names ---


def worker_peak_bytes() -> int:
    """The largest resident set that one of this session's Spark Python workers ever had."""
    peaks = [0]
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # or a zombie
            if "cdc_assets.snapshot.python_daemon" in process.cmdline():
                status = Path(f"/proc/{process.pid}/status").read_text()
                peaks += [int(kb) * 1024 for kb in re.findall(r"VmHWM:\s+(\d+)", status)]
    return max(peaks)


def test_values_of_a_hundred_megabytes_are_copied_in_bounded_memory(
    postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path
) -> None:
    setup = """
    create table t (id int primary key, v text, b bytea);
    insert into t select i, repeat(md5(i::text), 3276800),
           decode(repeat(md5(i::text), 3276800), 'hex') from generate_series(1, 8) i;
    """
    with lake(
        postgres_dsn(),
        spark_server.ensure(),
        setup,
        "t",
        snapshot={"max_parallel_chunks": 1},
    ) as source:
        source.pin()
        source.copy()
        peak = worker_peak_bytes()
        copied = source.session.sql(
            f"select id, length(v), md5(v), length(b), md5(b)"
            f" from {source.lake_table(T).sql_name} order by id"
        ).collect()
        there = source.execute("select id, length(v), md5(v), length(b), md5(b) from t order by 1")
        assert [tuple(row) for row in copied] == there
        assert there[0][1] == 104_857_600
        assert there[0][3] == 52_428_800
        print(f"a worker's peak: {peak / 2**20:.0f} MB")  # noqa: T201
        # Some copies of one row, however many rows there are: 1.2 GB with one, 1.4 GB with eight.
        assert 0 < peak < 12 * 150 * 2**20


def test_a_table_of_a_thousand_columns_is_copied_and_followed(
    postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path
) -> None:
    kinds = ("int", "text", "numeric(6,2)", "boolean", "date")
    values = ("i", "'v' || i % 10", "i / 100.0", "i % 2 = 0", "date '2024-01-01' + i % 300")
    columns = "".join(f", c{n} {kinds[n % 5]}" for n in range(999))
    listed = "".join(f", {values[n % 5]}" for n in range(999))
    setup = f"""
    create table t (id int primary key{columns});
    insert into t select i{listed} from generate_series(1, 2000) i;
    """
    with lake(postgres_dsn(), spark_server.ensure(), setup, "t") as source:
        source.pin()
        source.copy()
        assert equal(source, T)
        source.execute("update t set c0 = -1, c998 = null where id % 10 = 0")
        catch_up(source)
        assert equal(source, T)


def test_an_empty_table_and_one_that_grows_tenfold_show_the_moment_of_the_pin(
    postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path
) -> None:
    setup = PAIR + "delete from u;" + "create table empty (id int primary key, v text);"
    with lake(
        postgres_dsn(), spark_server.ensure(), setup, {"name": "t", "chunk_pages": 1}, "u", "empty"
    ) as source:
        source.pin()
        for table in ("t", "u"):
            source.execute(
                f"insert into {table} select i, 'new' from generate_series(1001, 10000) i"
            )
        source.copy()
        assert source.rows(T) == sorted(((i, f"old {i}") for i in range(1, 1001)), key=repr)
        assert source.rows(U) == []
        assert source.rows(TableId("public", "empty")) == []
        catch_up(source)
        assert len(source.rows(T)) == 10000
        assert all(equal(source, table) for table in source.tables)


def test_odd_names_are_copied_merged_and_verified(
    any_postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path
) -> None:
    setup = f"""
    create schema "My.Schema";
    create table {ODD} (
        "Id %s" int, "id %s" text, "a.b" text, "q""uo'te`" text, "Größe/\\ {{}}" numeric(5,1),
        primary key ("Id %s", "id %s")
    );
    insert into {ODD} select i, 'k' || i, 'v', repeat('x', 50), 1.5
      from generate_series(1, 3000) i;
    create table "we ird" (id int primary key);
    insert into "we ird" values (1);
    """
    names = (str(ODD), 'public."we ird"')
    with lake(
        any_postgres_dsn(),
        spark_server.ensure(),
        setup,
        *({"name": name, "chunk_pages": 4} for name in names),
    ) as source:
        source.pin()
        keys = [chunk.key for chunk in chunks(source.pipeline.store, ODD, 1)]
        copy_table(source.pipeline, source.session, ODD, only=keys[:2])
        source.execute(f'update {ODD} set "a.b" = \'new\' where "Id %s" % 3 = 0')
        source.copy()
        source.execute(
            f'update {ODD} set "id %s" = \'moved\', "q""uo\'te`" = null where 9 > "Id %s"'
        )
        source.execute(f'delete from {ODD} where "Id %s" % 5 = 0')
        catch_up(source)
        assert equal(source, ODD)
        assert all(comparison.equal for comparison in source.verify())


# --- values that the lake can't hold ---


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("date", "'infinity'"),
        ("timestamptz", "'0044-03-15 12:00+00 BC'"),
        ("numeric(6,2)", "'NaN'"),
        ("int[]", "'{{1,2},{3,4}}'"),
        ("numeric(4,1)[]", "'[0:0][0:0]={{1.5}}'"),
    ],
)
def test_policy_fail_names_the_column_of_a_value_that_the_lake_can_not_hold(
    postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path, kind: str, value: str
) -> None:
    setup = f"""
    {PAIR} create table odd (id int primary key, "the Value" {kind});
    insert into odd values (1, null), (2, {value});
    """
    with lake(
        postgres_dsn(),
        spark_server.ensure(),
        setup,
        {"name": "odd", "columns": {"unrepresentable": "fail"}},
        "t",
    ) as source:
        odd = TableId("public", "odd")
        source.pin()
        with pytest.raises(TableProblem, match=r"odd: column the Value has a .*null or clamp"):
            copy_table(source.pipeline, source.session, odd)
        assert state(source, odd).state != "streaming"
        assert source.rows(odd) == []
        copy_table(source.pipeline, source.session, T)
        assert equal(source, T)


def test_an_array_of_two_dimensions_is_null_under_policy_null(
    postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path
) -> None:
    setup = """
    create table t (id int primary key, a int[], n numeric(4,1)[]);
    insert into t values (1, '{1,null,3}', '{1.5}'), (2, '{{1,2},{3,4}}', '[0:1]={1.5,2.5}'),
        (3, '{}', null);
    """
    with lake(postgres_dsn(), spark_server.ensure(), setup, "t") as source:
        source.pin()
        source.copy()
        assert [row[:2] for row in source.rows(T)] == [(1, [1, None, 3]), (2, None), (3, [])]
        source.execute("update t set id = id + 10")
        catch_up(source)
        assert [row[:2] for row in source.rows(T)] == [(11, [1, None, 3]), (12, None), (13, [])]
