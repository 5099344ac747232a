"""A lake table that can't be adopted is told with the reason, and is left as it is."""

from __future__ import annotations

import pytest

from cdc_assets.errors import TableProblem
from cdc_assets.lake.standing import is_begun
from cdc_assets.maintenance.run import maintain
from cdc_assets_tests.integration.lake.adopted.adopting import (
    COLUMNS,
    SETUP,
    T,
    asks,
    begin,
    equal,
    equality_deletes,
    filled,
    loaded,
    made,
)
from cdc_assets_tests.support.lake import Lake, NewLake

pytestmark = pytest.mark.spark


def refused(source: Lake, reason: str) -> None:
    """Whatever works with the table leaves it as it is, and its log waits."""
    before = loaded(source)
    with pytest.raises(TableProblem, match=reason):
        source.drain(T)
    assert not is_begun(source.pipeline.store, source.lake_table(T))
    [done] = maintain(source.pipeline, lambda: source.session, [T])
    assert done.left_alone == "it isn't adopted yet"
    after = loaded(source)
    assert after.metadata_location == before.metadata_location
    assert after.metadata.snapshots == before.metadata.snapshots
    assert source.pipeline.store.log_end(T) > 0


def test_tables_that_do_not_fit(new_lake: NewLake) -> None:
    """Each is mended afterwards, as the reason says; then the same table is adopted."""
    with new_lake(SETUP, {"name": "t", "adopt": True}) as source:
        made(source)
        filled(source, source.execute("select id, v, n from t"))
        begin(source)
        source.execute("update t set v = 'later' where id < 5")
        source.flush()

        def misfit(breaks: str, reason: str, mends: str) -> None:
            source.session.sql(f"alter table lake.src.t {breaks}")
            refused(source, reason)
            source.session.sql(f"alter table lake.src.t {mends}")

        misfit("rename column id to k", "lacks the key column id: add it", "rename column k to id")
        misfit("rename column v to V", r"lacks the column v \(it has V", "rename column V to v")
        misfit("add column x int", "has a column x, which the source lacks", "drop column x")
        misfit(
            "add partition field bucket(4, id)",
            r'set partition_by: \["bucket\(4, id\)"\]',
            "drop partition field bucket(4, id)",
        )
        misfit(
            "set tblproperties ('cdc.source' = 'other', 'cdc.table' = 'public.x')",
            r"it is the table public\.x of source other",
            "unset tblproperties ('cdc.source', 'cdc.table')",
        )
        misfit(
            "set tblproperties ('cdc.copying' = 'x')",
            "a copy of it was never completed",
            "unset tblproperties ('cdc.copying')",
        )
        misfit(
            "set tblproperties ('gc.enabled' = 'false')",
            "its files may be another table's",
            "unset tblproperties ('gc.enabled')",
        )
        misfit("drop column v", "lacks the column v: add it as string", "add column v string")
        asks(source, None)
        refused(source, "doesn't say adopt any more")
        asks(source, {"lsn": "0/1"})
        refused(source, "its log begins at .*the changes between are in neither.*--repair")
        asks(source, {"lsn": "FFFFFF/0"})
        refused(source, "which the log hasn't reached")
        asks(source, True)
        with pytest.raises(TableProblem, match="without a position"):
            source.drain(T)
        assert [one.equal for one in source.verify(repair=True)] == [True]
        assert equal(source)


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        (COLUMNS.replace("id int", "id bigint"), "key column id is bigint, and has to be int"),
        (COLUMNS.replace("decimal(10,2)", "double"), r"column n is double.* decimal\(10,2\)"),
        (COLUMNS.replace("v string", "v string not null"), "column v takes no NULL"),
        (COLUMNS.replace("decimal(10,2)", "string"), "columns.types: {n: string}"),
    ],
)
def test_columns_of_another_type(new_lake: NewLake, columns: str, reason: str) -> None:
    with new_lake(SETUP, {"name": "t", "adopt": True}) as source:
        made(source, columns)
        source.session.sql("insert into lake.src.t (id, v, n) values (1, 'a', 1)")
        begin(source)
        source.execute("update t set v = 'later' where id < 5")
        source.flush()
        refused(source, reason)


def test_equality_deletes(new_lake: NewLake) -> None:
    """Merges write deletes by position; equality deletes would hide rows of theirs by surprise."""
    with new_lake(SETUP, {"name": "t", "adopt": True}) as source:
        made(source)
        filled(source, source.execute("select id, v, n from t"))
        equality_deletes(source)
        assert loaded(source).inspect.delete_files().column("content").to_pylist() == [2]
        begin(source)
        source.execute("update t set v = 'later' where id < 5")
        source.flush()
        refused(source, "it has equality deletes")


def test_where_there_is_none_or_no_key(new_lake: NewLake) -> None:
    keyless = SETUP.replace(" primary key", "") + "alter table t replica identity full"
    with new_lake(keyless, {"name": "t", "adopt": True}) as source:
        begin(source)
        source.execute("insert into t (v) values ('later')")
        source.flush()
        with pytest.raises(TableProblem, match="there is no lake table"):
            source.drain(T)
        made(source)
        refused(source, "without a key its rows can't be corrected")
