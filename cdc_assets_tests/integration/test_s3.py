"""Staging and the lake on an object store: copied, followed, merged, compared, as on a disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support.lake import NewLake
from cdc_assets_tests.support.s3 import ObjectStore

SETUP = """
create table orders (id int primary key, note text, doc text);
alter table orders alter doc set storage external;
insert into orders select g, 'n' || g, repeat('doc' || g, 1000) from generate_series(1, 500) g;
create table parted (id int primary key, day date);
insert into parted select g, date '2026-01-01' + g % 3 from generate_series(1, 50) g;
"""


@pytest.mark.spark
def test_a_source_whose_every_file_is_on_an_object_store(
    copied_lake: NewLake, tmp_home: Path, s3: ObjectStore
) -> None:
    settings = {
        "s3": s3.settings,
        "staging": {"uri": "s3://bucket/staging"},
        "lake": {"catalog": {"warehouse": "s3://bucket/warehouse"}},
    }
    tables = ["orders", {"name": "parted", "partition_by": ["day"]}]
    with copied_lake(SETUP, *tables, **settings) as source:
        source.execute("update orders set note = 'changed' where id <= 100")
        source.execute("delete from orders where id > 450")
        source.execute("insert into orders values (1000, null, repeat('new', 1000))")
        source.execute("update parted set day = day + 1 where id < 10")
        source.catch_up()
        for found in source.verify():
            assert found.equal, found
        assert len(source.rows(TableId("public", "orders"))) == 451
        # Nothing of it is anywhere else.
        loaded = source.lake_table(TableId("public", "orders")).load()
        assert loaded is not None
        assert loaded.metadata_location.startswith("s3://bucket/warehouse/")
        entries = source.pipeline.store.entries(TableId("public", "orders"), 0)
        assert entries
        assert all(entry.rows.path.startswith("s3://bucket/staging/src/") for entry in entries)
    assert not list(tmp_home.rglob("*.parquet"))
