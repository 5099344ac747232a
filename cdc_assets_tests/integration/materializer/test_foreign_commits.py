"""What somebody else does to a lake table: it is continued exactly, or left with the reason.

Tables without a key, where a replay doubles rows and a hole leaves some out. Each case has one of
its own, and all share one pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from pyiceberg.table import update

from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.errors import TableProblem
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.log.copies.chunks import chunks, restart_copy
from cdc_assets.maintenance.run import maintain
from cdc_assets.materializer.outstanding import outstanding
from cdc_assets.postgres.names import TableId
from cdc_assets.snapshot.coordinator import copy_table
from cdc_assets_tests.conftest import databases
from cdc_assets_tests.support.lake import Lake, copied
from cdc_assets_tests.support.waiting import wait_for

pytestmark = pytest.mark.spark

TABLES = ("compacted", "forgotten", "set_back", "half_way", "appended", "idle", "copying", "ahead")
SETUP = "".join(
    f"create table {name} (v text); alter table {name} replica identity full;"
    f" insert into {name} select 'copied ' || i from generate_series(1, 5) i;"
    for name in TABLES
)


@pytest.fixture(scope="module")
def source(
    postgres_servers: Callable[[int], EmbeddedPostgres],
    spark_server: SparkServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Lake]:
    """Every table copied; two transactions follow, each in a merge of its own."""
    with pytest.MonkeyPatch.context() as patch, databases(postgres_servers(18)) as new:
        patch.setenv("CDC_ASSETS_HOME", str(tmp_path_factory.mktemp("home")))
        tables = [{"name": name, "mode": "mirror", "chunk_pages": 1} for name in TABLES]
        with copied(new(), spark_server.ensure(), SETUP, *tables) as opened:
            yield opened


def change(source: Lake, name: str, value: str) -> None:
    source.execute(f"insert into {name} values ('{value}'), ('{value}')")
    source.execute(f"delete from {name} where v = 'copied 1'")
    source.flush()


def test_a_change_by_a_clock_that_is_ahead_is_named_until_its_time_has_come(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = TableId("public", "ahead")
    loaded = source.lake_table(table).load()
    assert loaded is not None
    change(source, "ahead", "later")
    now = SimpleNamespace(now=lambda: datetime.now(UTC) + timedelta(seconds=65))
    with monkeypatch.context() as patch, loaded.transaction() as changing:
        patch.setattr(update, "datetime", now)
        changing.set_properties(by="another")
    with pytest.raises(TableProblem, match="Spark's clock is behind"):
        source.drain(table)
    wait_for(lambda: drained(source, table))
    assert source.equal(table)


def drained(source: Lake, table: TableId) -> bool:
    try:
        source.drain(table)
    except TableProblem:
        return False
    return True


def merged(source: Lake, name: str, value: str) -> int:
    """Merge one more change; the snapshot that it ends with."""
    change(source, name, value)
    source.drain(TableId("public", name))
    return head(source, name)


def head(source: Lake, name: str) -> int:
    found = source.lake_table(TableId("public", name)).state().snapshot_id
    assert found is not None
    return found


def call(source: Lake, procedure: str, name: str, arguments: str = "") -> None:
    source.session.sql(f"call lake.system.{procedure}(table => 'lake.src.{name}'{arguments})")


def expire(source: Lake, name: str) -> None:
    """As managed catalogs do: nothing but the current snapshot stays."""
    older = ", older_than => timestamp '2100-01-01', retain_last => 1"
    call(source, "expire_snapshots", name, older)
    assert source.session.table(f"lake.src.{name}.snapshots").count() == 1


def rewrite(source: Lake, name: str) -> None:
    call(source, "rewrite_data_files", name, ", options => map('rewrite-all', 'true')")


def goes_on(source: Lake, name: str) -> None:
    """Whatever comes next is applied once, to all that there was."""
    merged(source, name, "after")
    equal(source, name)


def equal(source: Lake, name: str) -> None:
    table = TableId("public", name)
    assert source.rows(table) == sorted(source.execute(f"select v from {name}"), key=repr)


def parked(source: Lake, name: str) -> str:
    """Why it can't go on, however often one tries; the rows of others aren't concerned."""
    table = TableId("public", name)
    for attempt in (outstanding, lambda pipeline, table: source.drain(table)):
        with pytest.raises(TableProblem, match="cdc-assets resync"):
            attempt(source.pipeline, table)
    row = source.row(table)
    assert row.state == "parked" and row.reason is not None
    return row.reason


def stopped(source: Lake, name: str) -> str:
    """Why nothing more is applied to it; it isn't parked: its log is kept."""
    with pytest.raises(TableProblem, match="cdc-assets resync") as problem:
        outstanding(source.pipeline, TableId("public", name))
    with pytest.raises(TableProblem) as same:
        source.drain(TableId("public", name))
    assert str(same.value) == str(problem.value)
    assert source.row(TableId("public", name)).state == "streaming"
    return str(problem.value)


def test_a_table_that_others_compact_and_expire_is_continued(source: Lake) -> None:
    name = "compacted"  # before its first merge: only the copy has named a cursor
    rewrite(source, name)
    rewrite(source, name)
    call(source, "rewrite_manifests", name)
    expire(source, name)
    refs = {"branch": "cdc_audit", "tag": "cdc_2026"}  # which stay, whatever they are called
    for kind, ref in refs.items():
        source.session.sql(f"alter table lake.src.{name} create {kind} {ref}")
    goes_on(source, name)
    loaded = source.lake_table(TableId("public", name)).load()
    assert loaded is not None and set(loaded.metadata.refs) == {"main", *refs.values()}


def test_a_table_that_has_forgotten_its_cursor_is_parked(source: Lake) -> None:
    name = "forgotten"
    merged(source, name, "before")
    few = "'write.metadata.previous-versions-max'='1'"
    source.session.sql(f"alter table lake.src.{name} set tblproperties ({few})")
    rewrite(source, name)
    expire(source, name)
    rewrite(source, name)
    expire(source, name)
    change(source, name, "after")
    assert "says how far its log is applied" in parked(source, name)


def test_a_table_that_was_set_back_is_continued_from_there_while_its_log_is(source: Lake) -> None:
    name = "set_back"
    first = head(source, name)
    merged(source, name, "before")
    back = f", snapshot_id => {first}"
    call(source, "rollback_to_snapshot", name, back)
    goes_on(source, name)
    # Maintenance, a day after they were applied.
    source.execute(f"delete from _pg2iceberg.log_index where table_name = 'public.{name}'")
    call(source, "rollback_to_snapshot", name, back)
    assert "its log has a gap" in parked(source, name)


def test_to_a_table_that_was_set_back_into_a_merge_nothing_is_applied(source: Lake) -> None:
    name = "half_way"
    before = head(source, name)
    after = merged(source, name, "before")
    loaded = source.lake_table(TableId("public", name)).load()
    assert loaded is not None
    ids = {s.parent_snapshot_id: s.snapshot_id for s in loaded.metadata.snapshots}
    assert ids[ids[before]] == after  # delete, then append
    call(source, "set_current_snapshot", name, f", snapshot_id => {ids[before]}")
    change(source, name, "after")
    assert "somebody else changed rows" in stopped(source, name)


def test_to_a_table_that_others_wrote_to_nothing_is_applied_and_it_is_compared(
    source: Lake,
) -> None:
    source.session.sql("insert into lake.src.appended values ('foreign')")
    compared = {c.table.name: c for c in source.verify() if c.problem is None}
    assert compared["appended"].differing == 1
    change(source, "appended", "after")  # merged by the comparison, it would be forgotten
    assert "(append, " in stopped(source, "appended")


def test_a_copy_whose_commits_are_expired_is_parked(source: Lake) -> None:
    """What has landed would be copied again."""
    table = TableId("public", "copying")
    source.execute("insert into copying select repeat('long', 500) from generate_series(1, 20)")
    row = source.row(table)
    restart_copy(source.pipeline.store, row)
    source.pin()
    first, second, *_ = (c.key for c in chunks(source.pipeline.store, table, row.epoch + 1))
    for key in (first, second):
        copy_table(source.pipeline, source.session, table, only=[key])
    expire(source, f"copying__copy_{row.epoch + 1}")
    with pytest.raises(TableProblem, match=r"expired snapshots.*cdc-assets resync"):
        copy_table(source.pipeline, source.session, table)
    row = source.row(table)
    assert row.state == "parked"


def test_maintenance_finds_what_others_did_to_a_table_that_rests(source: Lake) -> None:
    table = TableId("public", "idle")
    first = head(source, "idle")
    merged(source, "idle", "before")
    rewrite(source, "idle")
    (done,) = maintain(source.pipeline, lambda: source.session, [table], thorough=False)
    assert done.problem is None
    assert source.lake_table(table).state().at_head  # within reach, whatever expires
    call(source, "rollback_to_snapshot", "idle", f", snapshot_id => {first}")
    (done,) = maintain(source.pipeline, lambda: source.session, [table], thorough=False)
    assert done.problem is None
    assert next(b.rows for b in source.pipeline.store.backlogs() if b.table == table) == 3
    source.drain(table)
    equal(source, "idle")
    source.session.sql("insert into lake.src.idle values ('foreign')")
    (done,) = maintain(source.pipeline, lambda: source.session, [table], thorough=False)
    assert "somebody else changed rows" in str(done.problem)
    assert "(append, " in stopped(source, "idle")
