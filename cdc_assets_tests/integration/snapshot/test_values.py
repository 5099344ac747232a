"""Values that the lake can't hold, by policy."""

from __future__ import annotations

import pytest

from cdc_assets.errors import TableProblem
from cdc_assets.postgres.names import TableId
from cdc_assets.snapshot.coordinator import copy_table
from cdc_assets_tests.integration.snapshot.sources import PAIR, T
from cdc_assets_tests.support.lake import NewLake

pytestmark = pytest.mark.spark


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
    new_lake: NewLake, kind: str, value: str
) -> None:
    setup = f"""
    {PAIR} create table odd (id int primary key, "the Value" {kind});
    insert into odd values (1, null), (2, {value});
    """
    with new_lake(
        setup,
        {"name": "odd", "columns": {"unrepresentable": "fail"}},
        "t",
    ) as source:
        odd = TableId("public", "odd")
        source.pin()
        with pytest.raises(TableProblem, match=r"odd: column the Value has a .*null or clamp"):
            copy_table(source.pipeline, source.session, odd)
        assert source.row(odd).state != "streaming"
        assert source.rows(odd) == []
        copy_table(source.pipeline, source.session, T)
        assert source.equal(T)


def test_an_array_of_two_dimensions_is_null_under_policy_null(copied_lake: NewLake) -> None:
    setup = """
    create table t (id int primary key, a int[], n numeric(4,1)[]);
    insert into t values (1, '{1,null,3}', '{1.5}'), (2, '{{1,2},{3,4}}', '[0:1]={1.5,2.5}'),
        (3, '{}', null);
    """
    with copied_lake(setup, "t") as source:
        assert [row[:2] for row in source.rows(T)] == [(1, [1, None, 3]), (2, None), (3, [])]
        source.execute("update t set id = id + 10")
        source.catch_up()
        assert [row[:2] for row in source.rows(T)] == [(11, [1, None, 3]), (12, None), (13, [])]
