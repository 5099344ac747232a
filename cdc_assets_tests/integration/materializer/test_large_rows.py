"""Batches of few changes that are too large to be folded by the client: their rows are large."""

from __future__ import annotations

from typing import Any

import pytest

from cdc_assets.materializer import winners
from cdc_assets.materializer.actions import keyed
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support.backfills import SETUP, backfilled, damage
from cdc_assets_tests.support.lake import NewLake

pytestmark = pytest.mark.spark

T = TableId("public", "t")
# Values of 200 MB, which Iceberg's vectorized reader doesn't read.
LARGE = "insert into t select 1, 'large', repeat(md5('1'), 6250000)"
SUMS = "select id, v, length(big), md5(big) from {} order by id"


def test_a_row_of_200_mb_is_inserted_at_the_default_heap(new_lake: NewLake) -> None:
    with new_lake(f"{SETUP}; delete from t", "t") as lake:
        lake.pin()
        lake.copy()
        lake.execute(LARGE)
        lake.catch_up()
        lake.session.conf.set("spark.sql.iceberg.vectorization.enabled", "false")
        found = lake.session.sql(SUMS.format(lake.lake_table(T).sql_name)).collect()
        assert [tuple(row) for row in found] == lake.execute(SUMS.format("t"))


def test_no_row_of_few_is_grouped_or_sorted(
    new_lake: NewLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fold(*_: Any, **__: Any) -> None:
        raise AssertionError("its rows would be grouped")

    with new_lake(SETUP, "t") as lake:
        lake.pin()
        lake.copy()
        monkeypatch.setattr(winners, "_TEXT_BYTES", 0)
        monkeypatch.setattr(keyed, "fold", fold)
        lake.execute("insert into t values (900, 'new', 'b'), (901, 'new', 'c')")
        lake.catch_up()
        assert lake.equal(T)
        lake.execute("update t set v = v || 'x', big = v where id in (1, 900)")
        lake.execute("update t set v = 'y', big = 'z' where id in (1, 2)")
        lake.execute(
            "update t set id = 999, big = 'moved' where id = 3; delete from t where id = 4"
        )
        lake.catch_up()
        assert lake.equal(T)
        lake.execute("delete from t where id = 5")
        lake.catch_up()
        assert lake.equal(T)
        damage(lake, "delete from lake.src.t where id = 7", "update lake.src.t set v = 'wrong'")
        assert backfilled(lake).state == "done"
        assert lake.equal(T)
        lake.execute("insert into t values (902, 'a', 'b'); truncate t")
        lake.execute("insert into t values (1, 'anew', 'b'), (2, 'anew', 'c')")
        lake.catch_up()
        assert lake.equal(T)
