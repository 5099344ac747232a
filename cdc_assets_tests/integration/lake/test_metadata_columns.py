"""``metadata``: when a row was written to the lake, and an LSN that it is as of."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from pydantic import ValidationError

from cdc_assets.config.tables import ColumnsConfig, TableConfig
from cdc_assets.errors import TableProblem
from cdc_assets.lake.catalog.catalog import open_catalog
from cdc_assets.maintenance.run import maintain
from cdc_assets.materializer.drain import drain
from cdc_assets.operations.copying import mark_for_copy
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support.lake import Lake, NewLake

pytestmark = pytest.mark.spark

BOTH = ("_synced_at", "_lsn")
MODES: dict[str, dict[str, Any]] = {
    "keyed": {"metadata": BOTH},
    "soft": {"metadata": BOTH, "mode": "soft_delete"},
    "counted": {"metadata": BOTH},
    "appended": {"metadata": ["_synced_at"], "mode": "append"},
}
SETUP = (
    "".join(
        f"create table {name} (id int{'' if name == 'counted' else ' primary key'}, v text);"
        f" insert into {name} values (1, 'a'), (2, 'b');"
        for name in MODES
    )
    + "alter table counted replica identity full;"
)
KEYED = TableId("public", "keyed")
ONE = "create table keyed (id int primary key, v text); insert into keyed values (1, 'a')"
Told = dict[int, tuple[datetime, int]]


def _told(source: Lake, name: str) -> Told:
    rows = source.session.sql(f"select id, _synced_at, _lsn from lake.src.{name}").collect()
    return {row[0]: (row[1], row[2]) for row in rows}


def _lsn(source: Lake) -> int:
    [(lsn,)] = source.execute("select pg_current_wal_insert_lsn()::text")
    return int(Lsn.parse(lsn))


def test_a_row_says_when_it_was_written_and_what_it_is_as_of(copied_lake: NewLake) -> None:
    tables = [{"name": name, **more} for name, more in MODES.items()]
    with copied_lake(SETUP, *tables, maintenance={"min_input_files": 2}) as source:
        before = {name: _told(source, name) for name in MODES}
        assert all(None not in told for rows in before.values() for told in rows.values())
        since = _lsn(source)
        for name in MODES:
            source.execute(f"update {name} set v = 'c' where id = 1; insert into {name} values (3)")
        until = _lsn(source)
        source.catch_up()
        for name in MODES:
            found = _told(source, name)
            if name != "appended":  # it has a row a change
                assert found[2] == before[name][2], "another row's change is none of its"
                assert since < found[1][1] <= until + 1000
            assert found[3][0] > before[name][1][0]
            assert found[3][1] > before[name][2][1]
        assert [c.differing for c in source.verify()] == [0] * len(MODES)
        source.execute("truncate soft; alter table keyed add column w int default 5")
        source.execute("insert into keyed values (4, 'd', 6)")
        source.catch_up()
        assert _told(source, "soft")[2] > before["soft"][2], "it was marked"
        assert _told(source, "keyed")[2][1] == before["keyed"][2][1]
        done = list(maintain(source.pipeline, lambda: source.session, source.tables))
        assert [one.problem for one in done] == [None] * len(MODES)
        mark_for_copy(source.pipeline, [TableId("public", "keyed")])
        source.pin()
        source.copy()
        assert _told(source, "keyed")[2][1] > until
        assert [c.differing for c in source.verify()] == [0] * len(MODES)


def test_they_may_come_and_go(copied_lake: NewLake) -> None:
    setup = "create table keyed (id int primary key, v text); insert into keyed values (1, 'a')"
    table = TableId("public", "keyed")
    with copied_lake(setup, "keyed") as source:

        def merged(*metadata: str) -> list[tuple[Any, ...]]:
            made = source.config.tables[0].model_copy(update={"metadata": metadata})
            source.flush()
            with Pipeline.open(source.config.model_copy(update={"tables": (made,)})) as pipeline:
                drain(pipeline, source.session, table)
            place = source.config.lake_identifier(table)
            names = [f.name for f in open_catalog(source.config).load_table(place).schema().fields]
            assert names[2:] == ["_lsn"], names
            return source.rows(table)

        source.execute("insert into keyed values (2, 'b')")
        rows = merged("_lsn")
        assert rows[0] == (1, "a", None)
        assert rows[1][2] > 0
        source.execute("insert into keyed values (3, 'c')")
        assert merged()[2] == (3, "c", None)
        assert [c.equal for c in source.verify()] == [True]


def _merged(source: Lake, table: TableId = KEYED, **settings: Any) -> None:
    """Merge what has changed, with other settings of the first table."""
    made = source.config.tables[0].model_copy(update=settings)
    source.flush()
    with Pipeline.open(source.config.model_copy(update={"tables": (made,)})) as pipeline:
        drain(pipeline, source.session, table)


@pytest.mark.parametrize(
    ("settings", "changes", "said"),
    [
        ({"metadata": ["_lsn"]}, "alter table keyed add column _lsn bigint", "which metadata adds"),
        ({"mode": "append"}, "alter table keyed add column _lsn bigint", "which mode append adds"),
        (
            {"mode": "soft_delete"},
            "alter table keyed add column _deleted_at timestamptz",
            "which mode soft_delete adds",
        ),
    ],
)
def test_a_column_of_an_added_name_parks_the_table(
    copied_lake: NewLake, settings: dict[str, Any], changes: str, said: str
) -> None:
    with copied_lake(ONE, {"name": "keyed", **settings}) as source:
        source.execute(f"{changes}; insert into keyed values (2, 'b')")
        with pytest.raises(TableProblem, match=said):
            source.catch_up()
        assert "Name it in columns.exclude, or" in str(source.row(KEYED).reason)


def test_a_rename_to_an_added_name_parks_the_table(copied_lake: NewLake) -> None:
    with copied_lake(ONE, {"name": "keyed", "mode": "soft_delete"}) as source:
        source.execute("insert into keyed values (2, 'b')")
        with pytest.raises(TableProblem, match="_deleted_at, which mode soft_delete adds"):
            _merged(source, columns=ColumnsConfig(rename={"v": "_deleted_at"}))
        names = source.session.table(source.lake_table(KEYED).sql_name).columns
        assert names == ["id", "v", "_deleted_at"]


def test_the_sources_column_never_gets_the_values_of_metadata(copied_lake: NewLake) -> None:
    with copied_lake(ONE, {"name": "keyed", "metadata": ["_lsn"]}) as source:
        source.execute("insert into keyed values (2, 'b')")
        _merged(source, metadata=())
        source.execute("alter table keyed add column _lsn bigint")
        source.execute("insert into keyed values (3, 'c', 42)")
        _merged(source, metadata=())
        found = source.session.sql("select id, _lsn from lake.src.keyed order by id").collect()
        assert [tuple(row) for row in found] == [(1, None), (2, None), (3, 42)]


def test_metadata_never_goes_into_a_column_that_was_dropped(copied_lake: NewLake) -> None:
    setup = "create table keyed (id int primary key, _lsn boolean); insert into keyed values"
    with copied_lake(f"{setup} (1, true)", "keyed") as source:
        source.execute("alter table keyed drop column _lsn; insert into keyed values (2)")
        source.catch_up()
        source.execute("insert into keyed values (3)")
        _merged(source, metadata=("_lsn",))
        first, _, last = source.session.sql("select * from lake.src.keyed order by id").collect()
        assert first[1:] == (True, None)
        assert last[1] is None
        assert last["_lsn"] > 0


def test_metadata_takes_a_name_that_a_rename_leaves(copied_lake: NewLake) -> None:
    with copied_lake(ONE, {"name": "keyed", "columns": {"rename": {"v": "_lsn"}}}) as source:
        source.execute("insert into keyed values (2, 'b')")
        _merged(source, metadata=("_lsn",), columns=ColumnsConfig())
        rows = source.session.sql("select v, _lsn from lake.src.keyed order by id").collect()
        assert [(row[0], row[1] is not None) for row in rows] == [("a", False), ("b", True)]


def test_a_truncate_raises_the_lsn_of_what_it_marks(copied_lake: NewLake) -> None:
    settings = {"name": "keyed", "metadata": ["_lsn"], "mode": "soft_delete"}
    with copied_lake(ONE, settings) as source:
        source.execute("update keyed set v = 'b'")
        source.catch_up()
        [(last,)] = source.session.sql("select max(_lsn) from lake.src.keyed").collect()
        source.execute("truncate keyed")
        source.execute("insert into keyed values (2, 'c')")
        source.catch_up()
        query = f"select id from lake.src.keyed where _lsn > {last} order by id"
        assert [row[0] for row in source.session.sql(query).collect()] == [1, 2]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"metadata": ["_lsn"], "mode": "append"}, "mode append has _lsn anyway"),
        ({"metadata": ["_lsn", "_lsn"]}, "names a column twice"),
        ({"metadata": ["_op"]}, "_synced_at"),
    ],
)
def test_what_there_is_not_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        TableConfig.model_validate({"name": "t", **settings})
