"""``columns.rename``: the lake's names of columns, whatever happens to them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from cdc_assets.config.tables import ColumnsConfig
from cdc_assets.lake.catalog.catalog import open_catalog
from cdc_assets.maintenance.run import maintain
from cdc_assets.materializer.drain import drain
from cdc_assets.operations.copying import mark_for_copy
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId, lake_column
from cdc_assets.readiness.surroundings import review
from cdc_assets_tests.support.lake import Lake, NewLake

pytestmark = pytest.mark.spark

NAMES = ("mirrored", "appended", "counted", "soft")
T = TableId("public", "mirrored")
SETUP = (
    "".join(
        f"create table {name} (id int{'' if name == 'counted' else ' primary key'}, big text,"
        f" total int, v text, _op text); alter table {name} alter big set storage external;"
        f" insert into {name} select i, repeat('big' || i, 1000), i, 'v', 'o'"
        " from generate_series(1, 9) i;"
        for name in NAMES
    )
    + "alter table counted replica identity full;"
)
MODES = {"appended": "append", "soft": "soft_delete"}
RENAME = {"id": "order_id", "big": "total", "v": "Värde 1", "_op": "operation"}
CHANGES = (
    "update {0} set v = 'changed' where id < 4; delete from {0} where id = 5;"
    " update {0} set id = 100, total = 7 where id = 6; insert into {0} values (200, 'new', 1, 'n');"
)


def _tables() -> list[dict[str, Any]]:
    named = {"columns": {"rename": RENAME}}
    found: list[dict[str, Any]] = [
        {"name": name, "mode": MODES.get(name, "mirror"), **named} for name in NAMES
    ]
    found[0] |= {"partition_by": ["bucket(2, order_id)"], "sort_by": ["total__source"]}
    return found


def _names(source: Lake, table: TableId = T) -> list[str]:
    loaded = open_catalog(source.config).load_table(source.config.lake_identifier(table))
    return [field.name for field in loaded.schema().fields]


def test_columns_have_their_names_all_the_way(new_lake: NewLake) -> None:
    with new_lake(SETUP, *_tables(), maintenance={"min_input_files": 2}) as source:
        found = {f.code: f for f in review(source.config) if "mirrored" in f.message}
        assert "total as total__source" in found["column_renamed"].message
        source.pin()
        source.copy()
        for name in NAMES:
            source.execute(CHANGES.format(name))
        source.catch_up()
        assert _names(source) == ["order_id", "total", "total__source", "Värde 1", "operation"]
        assert [(c.table.name, c.differing, c.problem) for c in source.verify()] == [
            (name, 0, None) for name in NAMES
        ]
        # A column that is called as another one in the lake, one that loses its name, one that
        # gets a name which is renamed.
        source.execute(
            "alter table mirrored add column order_id int default 3; alter table mirrored rename v"
            " to w; alter table mirrored add column v int; update mirrored set v = 1 where id = 1"
        )
        source.catch_up()
        assert _names(source) == [
            *("order_id", "total", "total__source", "w", "operation"),
            *("order_id__source", "Värde 1"),
        ]
        assert [c.differing for c in source.verify()] == [0] * len(NAMES)
        done = list(maintain(source.pipeline, lambda: source.session, source.tables))
        assert [one.problem for one in done] == [None] * len(source.tables)
        mark_for_copy(source.pipeline, [T])
        source.pin()
        source.copy()
        source.execute("update mirrored set w = 'again' where id = 3")
        source.catch_up()
        assert [c.differing for c in source.verify()] == [0] * len(NAMES)


def test_another_name_is_given_by_the_next_merge(copied_lake: NewLake) -> None:
    setup = "create table mirrored (id int primary key, a int, b int); insert into mirrored"
    with copied_lake(f"{setup} values (1, 2, 3)", "mirrored") as source:
        rules = ColumnsConfig(rename={"a": "b", "b": "a"})
        table = source.config.tables[0].model_copy(update={"columns": rules})
        source.execute("insert into mirrored values (4, 5, 6)")
        source.flush()
        config = source.config.model_copy(update={"tables": (table,)})
        with Pipeline.open(config) as pipeline:
            drain(pipeline, source.session, T)
        assert _names(source) == ["id", "b", "a"]
        assert sorted(source.rows(T)) == [(1, 2, 3), (4, 5, 6)]


def test_a_columns_name_depends_on_no_other_column(new_lake: NewLake) -> None:
    """A name that is given is kept free while its column isn't there yet, or any more."""
    given = {"name": "mirrored", "columns": {"rename": {"a": "b"}}}
    with new_lake("create table mirrored (id int primary key, b int)", given) as source:
        found = {f.code: f.message for f in review(source.config) if "mirrored" in f.message}
        assert "column_missing" in found
        assert "b as b__source" in found["column_renamed"]
        source.pin()
        source.copy()
        assert _names(source) == ["id", "b__source"]
        source.execute("alter table mirrored add a int; insert into mirrored values (1, 2, 3)")
        source.catch_up()
        assert _names(source) == ["id", "b__source", "b"]
        source.execute("alter table mirrored drop a; insert into mirrored values (4, 5)")
        source.catch_up()
        assert _names(source) == ["id", "b__source", "b"]
        assert sorted(source.rows(T)) == [(1, 2, 3), (4, 5, None)]


def test_a_rename_that_differs_by_case_alone_is_found(new_lake: NewLake) -> None:
    alike = {"name": "mirrored", "columns": {"rename": {"b": "ID"}}}
    with new_lake("create table mirrored (id int primary key, b int)", alike) as source:
        [found] = [f for f in review(source.config) if f.code == "column_renamed"]
        assert "the lake has id beside it" in found.message


def test_no_two_columns_have_one_name() -> None:
    renamed = {"a": "x", "b": "y"}
    names = ("a", "b", "x", "y", "x__source", "x__source__source", "_pos", "_pos__source", "c")
    found = [lake_column(name, renamed) for name in names]
    assert len({*found}) == len(names)
    assert found[:2] == ["x", "y"]
    assert found[-1] == "c"


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"rename": {"a": "x", "b": "x"}}, "the name of two"),
        ({"rename": {"a": "_pos"}}, "can't be a column's name"),
        ({"rename": {"a": "x__source"}}, "can't be a column's name"),
        ({"rename": {"a": ""}}, "can't be a column's name"),
        ({"rename": {"a": "x"}, "exclude": ["a"]}, "is in exclude, too"),
    ],
)
def test_what_is_no_name_is_refused(rules: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        ColumnsConfig.model_validate(rules)
