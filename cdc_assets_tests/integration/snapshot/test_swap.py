"""A complete copy takes its table's place; a coordinator that was taken for dead can't undo it."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest

from cdc_assets.errors import CdcError
from cdc_assets.lake.catalog.catalog import open_catalog
from cdc_assets.lake.catalog.commits import Metadata, edited
from cdc_assets.lake.drafts.tables import table_draft
from cdc_assets.lake.spark.session import open_session
from cdc_assets.lake.tables import COPYING
from cdc_assets.log.copies.chunks import restart_copy
from cdc_assets.operations.copying import mark_for_copy
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.snapshot.coordinator import copy_table, copy_tables
from cdc_assets_tests.support.lake import Lake, NewLake

pytestmark = pytest.mark.spark

NAMES = ("fresh", "alike", "altered")
SETUP = "".join(
    f"create table {name} (v text, n int); alter table {name} replica identity full;"
    f" insert into {name} select 'copied ' || i, i from generate_series(1, 5) i;"
    for name in NAMES
)
# The statements that decide, where the rows aren't published on a branch.
DECIDING = ("create table", "create or replace table")


class Late:
    """The session of a coordinator whose deciding step is carried out late."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.asked, self.goes_on = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def sql(self, statement: str) -> Any:
        if any(text in statement for text in DECIDING):
            statement, read, source = statement.partition(" as select * from ")
            if read:  # its tasks are done by then, and the commit is yet to come
                rows = self._session.table(source).persist()
                rows.count()
                rows.createOrReplaceTempView("read_before")
                statement += f"{read}read_before"
            self.decides()
        return self._session.sql(statement)

    def decides(self) -> None:
        self.asked.set()
        assert self.goes_on.wait(120)


class LateDraft:
    """A draft of a late coordinator, which publishes it late."""

    def __init__(self, session: Late, draft: Any) -> None:
        self._session, self._draft = session, draft

    def __getattr__(self, name: str) -> Any:
        return getattr(self._draft, name)

    def publish(self) -> None:
        self._session.decides()
        self._draft.publish()


def drafted(session: Any, *arguments: Any) -> Any:
    made = table_draft(session, *arguments)
    assert made is not None
    return LateDraft(session, made) if isinstance(session, Late) else made


def copied_twice(source: Lake, table: TableId) -> None:
    """By a coordinator that decides late, and by another that comes between; a merge follows."""
    session = open_session(source.config)
    late: Any = Late(session)
    errors: list[BaseException] = []

    def work(own: Pipeline) -> None:
        try:
            copy_table(own, late, table)
        except (CdcError, psycopg.Error) as error:
            errors.append(error)

    with Pipeline.open(source.config) as own:
        thread = threading.Thread(target=work, args=(own,))
        thread.start()
        assert late.asked.wait(120)
        pid = own.store.connection.info.backend_pid
        source.execute(f"select pg_terminate_backend({pid}, 5000)")  # and its locks are free
        copy_table(source.pipeline, source.session, table)
        source.execute(f"insert into {table} (v) values ('merged'), ('merged')")
        source.flush()
        source.drain(table)
        late.goes_on.set()
        thread.join(120)
    session.stop()
    assert len(errors) == 1, errors


def equal(source: Lake, table: TableId) -> bool:
    return source.rows(table) == sorted(source.execute(f"select * from {table}"), key=repr)


def test_a_coordinator_that_was_taken_for_dead_never_undoes_what_followed(
    new_lake: NewLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdc_assets.lake.publish.table_draft", drafted)
    fresh, alike, altered = (TableId("public", name) for name in NAMES)
    tables = [{"name": name, "mode": "mirror"} for name in NAMES]
    tables[0] |= {"partition_by": ["bucket(2, v)"]}  # type: ignore[dict-item]
    with new_lake(SETUP, *tables) as source:
        source.pin()
        copied_twice(source, fresh)  # where there was no table
        assert source.equal(fresh)
        for table in (alike, altered):
            copy_table(source.pipeline, source.session, table)
        source.execute("alter table altered alter n type text")
        source.execute("delete from alike where n = 1")
        for table in (alike, altered):
            row = source.row(table)
            restart_copy(source.pipeline.store, row)
        source.pin()
        copied_twice(source, alike)
        assert source.equal(alike)
        copied_twice(source, altered)
        # It replaces the table whatever was committed meanwhile, and takes its cursor back with it.
        source.drain(altered)
        assert source.equal(altered)
        source.execute("truncate alike; insert into altered values ('last', 'x')")
        source.catch_up()
        assert all(source.equal(table) for table in source.tables)
        # Emptied, it is copied once more.
        row = source.row(alike)
        restart_copy(source.pipeline.store, row)
        source.pin()
        copy_table(source.pipeline, source.session, alike)
        assert source.equal(alike)
        assert all(one.equal for one in source.verify())


def test_a_copy_that_replaced_a_half_made_one_can_be_ended_twice(new_lake: NewLake) -> None:
    """Its coordinator dies between the swap, in format version 3, and telling that it is done."""
    settings = {"lake": {"format_version": 3}}
    with new_lake(SETUP, "alike", **settings) as source:
        [table] = source.tables
        source.pin()
        source.copy()
        source.execute("delete from alike where n = 1")
        source.flush()
        source.drain(table)
        name = source.lake_table(table).sql_name
        source.session.sql(f"alter table {name} set tblproperties ('{COPYING}' = '')")
        source.execute("update _pg2iceberg.tables set state = 'copying', complete_lsn = null")
        source.copy()
        loaded = source.lake_table(table).load()
        assert loaded is not None and COPYING not in loaded.properties
        source.drain(table)
        assert source.equal(table)


@pytest.mark.parametrize("altered", [False, True], ids=["alike", "altered"])
def test_a_table_keeps_its_format_version_where_a_lower_one_is_configured(
    new_lake: NewLake, altered: bool
) -> None:
    """Iceberg takes no version back: its copy would fail in its last step, for ever."""
    table = TableId("public", "alike")
    with new_lake(SETUP, {"name": "alike", "mode": "mirror"}) as source:
        source.pin()
        source.copy()
        source.execute("insert into alike values ('merged', 6)")
        source.catch_up()
        version = source.config.lake.model_copy(update={"format_version": 2})
        again = Lake(source.config.model_copy(update={"lake": version}), source.source)
        try:
            if altered:
                source.execute("alter table alike add w int default 7")
            restart_copy(again.pipeline.store, again.row(table))
            again.pin()
            again.copy()
            again.execute("delete from alike where n = 3")
            again.catch_up()
            assert again.equal(table)
            loaded = again.lake_table(table).load()
            assert loaded is not None and loaded.format_version == 3
        finally:
            again.close()


def test_a_lake_table_of_a_later_time_keeps_no_other_copy_from_its_end(new_lake: NewLake) -> None:
    """By another machine's clock, which is ahead: Iceberg refuses what is dated earlier."""
    tables = [TableId("public", name) for name in ("fresh", "alike")]
    with new_lake(SETUP, *(table.name for table in tables)) as source:
        source.pin()
        source.copy()
        source.catch_up()
        mark_for_copy(source.pipeline, tables)
        source.pin()
        ahead = source.lake_table(tables[0]).loaded()
        assert edited(open_catalog(source.config), ahead, _later)
        failed = copy_tables(source.pipeline, source.session, tables)
        assert {table.name for table in failed} == {"fresh"}
        assert "Spark's clock is behind" in str(failed[tables[0]])
        assert source.equal(tables[1])


def _later(metadata: Metadata) -> bool:
    metadata["last-updated-ms"] += 300_000
    return True
