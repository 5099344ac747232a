"""Verify finds what is wrong: it has to be able to fail."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from pydantic import SecretStr
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from cdc_assets.errors import TablesFailed
from cdc_assets.lake import tables
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.log.locks import write_lock
from cdc_assets.operations.merging import materialize
from cdc_assets.operations.running import Spark
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres import catalog
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.slots import create_slot
from cdc_assets.postgres.types import TypeMapping, mapping
from cdc_assets.verify import compare, point, together
from cdc_assets.verify.sample import sample
from cdc_assets.verify.source import read_source
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.support.flusher import flushing
from cdc_assets_tests.support.lake import Lake, copied, unhashed
from cdc_assets_tests.support.waiting import wait_for

pytestmark = pytest.mark.spark

SETUP = """
create table t (id int primary key, v text, n numeric(8,2), a text[], d double precision);
insert into t select i, 'v' || i, i, array['a b', null, '"'], i / 3.0 from generate_series(1, 50) i;
create table h (a int, b text);
alter table h replica identity full;
insert into h select i % 3, 'x' from generate_series(1, 9) i;
"""


@pytest.fixture(scope="module")
def spark_url(spark_server: SparkServer) -> str:
    return spark_server.ensure()


@pytest.fixture
def source(postgres_dsn: NewDatabase, spark_url: str, tmp_home: Path) -> Iterator[Lake]:
    with copied(postgres_dsn(), spark_url, SETUP, "t", {"name": "h", "mode": "mirror"}) as opened:
        yield opened


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No table is small enough to be compared together with others."""
    monkeypatch.setattr(together, "SMALL_ROWS", -1)


@pytest.fixture(params=["together", "alone"])
def either_way(request: pytest.FixtureRequest) -> None:
    if request.param == "alone":
        request.getfixturevalue("alone")


@pytest.mark.usefixtures("either_way")
def test_equal_tables_are_equal_at_one_lsn_even_with_changes_not_yet_applied(source: Lake) -> None:
    source.execute("update t set v = 'changed' where id < 10; delete from t where id = 11")
    source.execute("insert into h values (1, 'x'), (1, 'x'), (7, null)")
    found = source.verify()
    assert [c.equal for c in found] == [True, True]
    assert [c.source_rows for c in found] == [49, 12]


@pytest.mark.usefixtures("either_way")
def test_what_is_staged_with_a_comparisons_last_change_is_applied_after_it(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flusher is ahead of the point: the file that the point cuts isn't the last one."""

    def after_a_change(*arguments: object, **options: object) -> object:
        source.execute("update t set v = 'before the point' where id = 1")
        made = create_slot(*arguments, **options)  # type: ignore[arg-type]
        source.execute(
            "update t set v = 'behind it' where id in (1, 2); delete from t where id = 3"
        )
        return made

    def ahead() -> None:
        for number in range(2):
            source.flush()
            source.execute(f"update t set v = 'ahead {number}' where id = 4")

    monkeypatch.setattr(point, "create_slot", after_a_change)
    assert [one.equal for one in source.verify(ahead)] == [True, True]
    source.catch_up()
    assert source.equal(TableId("public", "t"))


@pytest.mark.usefixtures("either_way")
def test_every_kind_of_difference_is_found_and_named(source: Lake) -> None:
    for statement in (
        "delete from lake.src.t where id = 1",
        "update lake.src.t set v = 'wrong' where id = 2",
        "update lake.src.t set n = n + 0.01 where id = 3",
        "update lake.src.t set a = array('a b') where id = 4",
        "update lake.src.t set d = d + 1e-9 where id = 5",
        "update lake.src.t set v = null where id = 6",
        "insert into lake.src.t select * from lake.src.t where id = 7",
        "insert into lake.src.t values (99, 'surplus', 0, array(), 0)",
        "insert into lake.src.h values (1, 'x')",
    ):
        source.session.sql(statement)
    t, h = source.verify()
    assert not t.equal
    assert t.differing == 8
    assert [f'"id":"{i}"' in " ".join(t.keys) for i in (1, 2, 3, 4, 5, 6, 7, 99)] == [True] * 8
    assert (h.differing, unhashed(h.keys)) == (1, ['{"a":"1","b":"x"} (source 3, lake 4)'])


@pytest.mark.usefixtures("alone")
def test_a_table_that_is_truncated_while_it_is_read_is_compared_again(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []

    def truncate_after_the_pin(*arguments: object, **options: object) -> object:
        made = create_slot(*arguments, **options)  # type: ignore[arg-type]
        if len(calls) == 1:
            source.execute("truncate h; insert into h values (5, 'new')")
        calls.append(made)
        return made

    monkeypatch.setattr(point, "create_slot", truncate_after_the_pin)
    t, h = source.verify()
    assert (t.equal, h.equal, h.source_rows) == (True, True, 1)
    assert len(calls) == 3, "it compared one table twice"


@pytest.mark.usefixtures("alone")
def test_one_table_waits_at_a_time_and_only_until_both_sides_stand_still(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, at_work = source.pipeline.store, list[tuple[str, ...]]()

    def locked() -> tuple[str, ...]:
        return tuple(
            name for name in ("t", "h") if store.is_locked(write_lock(TableId("public", name)))
        )

    def read(*arguments: Any) -> object:
        at_work.append(locked())
        return read_source(*arguments)

    monkeypatch.setattr(compare, "read_source", read)
    waiting: list[tuple[str, ...]] = []
    assert all(c.equal for c in source.verify(lambda: waiting.append(locked())))
    assert waiting == [(), ("t",), ("h",)]
    assert at_work == [(), ()]


def test_a_table_that_cannot_be_compared_says_so_and_since_when(source: Lake) -> None:
    source.pipeline.store.park(TableId("public", "h"), "a reason")
    (t, h), (_, again) = source.verify(), source.verify()
    assert (t.outcome, h.outcome, h.equal) == ("equal", "not compared", False)
    assert "a reason" in str(h.problem)
    assert h.since == again.since is not None


@pytest.mark.usefixtures("alone")
def test_what_is_compared_outlives_its_snapshots_expiry(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(pipeline: Any, session: Any, beside: Any, *more: Any) -> object:
        if beside.lake.row.table.name == "t":  # meanwhile the table is rewritten and cared for
            source.session.sql("insert overwrite lake.src.t select * from lake.src.t")
            source.session.sql(
                "call lake.system.expire_snapshots(table => 'lake.src.t', retain_last => 1,"
                " older_than => timestamp '2100-01-01 00:00:00')"
            )
        return read_source(pipeline, session, beside, *more)

    monkeypatch.setattr(compare, "read_source", read)
    t, _ = source.verify()
    assert (t.outcome, t.problem, t.lake_rows) == ("equal", None, 50)
    tags = source.session.sql("select name from lake.src.t.refs where type = 'TAG'")
    assert tags.collect() == []


@pytest.mark.usefixtures("alone")
def test_a_table_that_others_commit_to_is_compared_and_keeps_no_tag(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Iceberg refuses a tag while anybody commits: a merge, or whoever sets a property."""
    sql, refused = source.session.sql, Counter[str]()

    def beside_a_commit(statement: str, *arguments: Any, **options: Any) -> DataFrame:
        made = re.search("(create|drop) tag", statement)
        if made is not None and refused[made[1]] < 2:
            refused[made[1]] += 1
            raise PySparkException("CommitFailedException: Table metadata refresh is required")
        return sql(statement, *arguments, **options)

    monkeypatch.setattr(source.session, "sql", beside_a_commit)
    assert [(c.outcome, c.problem) for c in source.verify()] == [("equal", None)] * 2
    assert refused == {"create": 2, "drop": 2}
    for table in source.tables:
        loaded = source.lake_table(table).load()
        assert loaded is not None and set(loaded.metadata.refs) == {"main"}


@pytest.mark.usefixtures("alone")
def test_what_one_table_has_keeps_no_other_from_being_compared(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A right that is taken away shows in Spark's tasks, or in a query of our own."""
    errors: list[Exception] = [
        PySparkException("permission denied for table t"),
        psycopg.errors.InsufficientPrivilege("permission denied for table t"),
    ]

    def read(pipeline: Any, session: Any, beside: Any, *more: Any) -> object:
        if beside.lake.row.table.name == "t":
            raise errors.pop()
        return read_source(pipeline, session, beside, *more)

    monkeypatch.setattr(compare, "read_source", read)
    for _ in range(len(errors)):
        t, h = source.verify()
        assert (t.outcome, h.outcome) == ("not compared", "equal")
        assert "permission denied for table t" in str(t.problem)
        assert t.since is not None


@pytest.mark.usefixtures("either_way")
def test_a_staged_file_that_is_gone_is_one_tables_problem(source: Lake) -> None:
    [t, h] = source.tables
    source.execute("update t set v = 'x' where id = 1")
    source.flush()
    source.execute("insert into h values (7, 'x')")
    source.flush()
    [entry] = source.pipeline.store.entries(t, 0)
    Path(entry.rows.path.removeprefix("file://")).unlink()
    with flushing(source.config) as progress:
        wait_for(lambda: progress.state == "streaming")
        skipped = [sample(source.pipeline, source.session, table, 100).skipped for table in (t, h)]
    assert "a file can't be used" in str(skipped[0])
    assert skipped[1] is None
    compared = source.verify()
    assert [c.outcome for c in compared] == ["not compared", "equal"]
    assert "a file can't be used" in str(compared[0].problem)
    source.execute("insert into h values (8, 'x')")
    source.flush()
    with Spark(source.config) as spark, pytest.raises(TablesFailed) as failed:
        materialize(source.pipeline, spark, [t, h])
    assert [problem.table for problem in failed.value.problems] == [t]
    assert len(source.rows(h)) == 11


@pytest.mark.usefixtures("either_way")
def test_what_only_the_lake_has_and_what_it_cannot_hold_is_said(source: Lake) -> None:
    source.session.sql("alter table lake.src.t add column note string")
    source.session.sql("update lake.src.t set note = 'mine' where id < 4")
    source.execute("alter table t drop column v")
    source.execute("update t set n = 'NaN' where id in (7, 8); update t set n = 1 where id = 9")
    t, h = source.verify()
    assert (t.outcome, dict(t.lost), h.remarks) == ("equal", {"n": 2}, [])
    assert list(t.others) == [
        "v is in the lake only, dropped at the source: 47 of 50 rows have a value",
        "note is in the lake only, of another writer: 3 of 50 rows have a value",
    ]
    source.session.sql("alter table lake.src.t drop column n")
    t = source.verify()[0]
    assert (t.outcome, t.since is not None, "n" in str(t.problem)) == ("not compared", True, True)


@pytest.mark.usefixtures("either_way")
def test_errors_of_what_it_checks_are_not_its_own(
    postgres_dsn: NewDatabase, spark_url: str, tmp_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = """
    create table n (id int primary key, v numeric(8,2), f real);
    create table p (id int primary key) partition by range (id);
    create table p1 partition of p for values from (0) to (10);
    create table p2 partition of p for values from (10) to (20);
    insert into p select generate_series(5, 14);
    """

    def faulty(postgres_type: str, forced: str | None = None) -> TypeMapping:
        found = mapping(postgres_type, forced)
        if not found.lake.startswith("decimal("):
            return found
        return replace(found, cast=lambda text, _: f"cast(round({text}, 1) as {found.lake})")

    monkeypatch.setattr(tables, "mapping", faulty)
    monkeypatch.setattr(
        catalog, "_HEAPS", catalog._HEAPS.replace("<> 'p'", "<> 'p' and c.relname <> 'p2'")
    )
    with copied(postgres_dsn(), spark_url, setup, "n", "p") as opened:
        opened.execute("insert into n values (1, 1.5, 0.1), (2, 1.25, 1e-30), (3, null, 'NaN')")
        n, p = opened.verify()
        assert (n.differing, unhashed(n.keys)) == (1, ['{"id":"2"} (source 1, lake 1: v)'])
        assert (p.source_rows, p.lake_rows, p.differing) == (10, 5, 5)


def test_a_missing_right_is_named_with_what_grants_it(source: Lake) -> None:
    """Spark tells of a reader's error only that there was one."""
    source.execute(
        "create role poor login replication password 'p'; grant select on h to poor;"
        " grant usage on schema _pg2iceberg to poor; grant select, insert, update, delete"
        " on all tables in schema _pg2iceberg to poor"
    )
    poor = source.config.postgres.model_copy(
        update={
            "dsn": SecretStr(make_conninfo(source.pipeline.source_dsn, user="poor", password="p"))
        }
    )
    config = source.config.model_copy(update={"postgres": poor})
    try:
        with Pipeline.open(config) as pipeline:
            found = compare.verify(
                pipeline, source.session, source.tables, lambda *_, **__: source.flush()
            )
    finally:
        source.execute("drop owned by poor; drop role poor")
    said = {str(one.table): one.problem or "" for one in found}
    assert said["public.h"] == ""
    assert 'grant select on public.t to "poor";' in said["public.t"]
