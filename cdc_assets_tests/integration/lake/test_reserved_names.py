"""Columns that Iceberg has of the same names, and a namespace called like the catalog."""

from __future__ import annotations

import pytest

from cdc_assets.maintenance.run import maintain
from cdc_assets.postgres.names import TableId
from cdc_assets.readiness.source.server import preflight
from cdc_assets_tests.support.lake import NewLake

pytestmark = pytest.mark.spark

NAMES = ("mirrored", "appended", "counted")
SETUP = "".join(
    f"create table {name} (_pos int, _file text, _file__source text, _deleted text, _spec_id int,"
    " _partition text, _row_id bigint, _last_updated_sequence_number int, _change_type text,"
    f" v text{'' if name == 'counted' else ', primary key (_pos)'});"
    f" alter table {name} alter _file set storage external;"
    f" insert into {name} select i, repeat('file' || i, 1000), 's', 'd', i, 'p', i, i, 'c', 'v'"
    " from generate_series(1, 9) i;"
    for name in NAMES
)
CHANGES = (
    "update {0} set v = 'changed' where _pos < 4; delete from {0} where _pos = 5;"
    " update {0} set _pos = 100, _deleted = 'moved' where _pos = 6;"
    " insert into {0} (_pos, _file) values (200, 'new');"
)
ALTERED = (
    "alter table mirrored add column _row_id__source text default 'added';"
    " alter table mirrored rename v to _commit_snapshot_id;"
    " update mirrored set _spec_id = 0 where _pos = 7;"
)


def test_columns_of_icebergs_names_are_renamed_and_go_all_the_way(new_lake: NewLake) -> None:
    modes = dict(zip(NAMES, ("mirror", "append", "mirror"), strict=True))
    tables = [
        {"name": name, "mode": mode, "columns": {"exclude": ["_row_id"]}}
        for name, mode in modes.items()
    ]
    tables[0] |= {"partition_by": ["bucket(2, _partition__source)"]}
    settings = {"lake": {"namespace": "lake"}, "maintenance": {"min_input_files": 2}}
    setup = SETUP + "alter table counted replica identity full;"
    with new_lake(setup, *tables, **settings) as source:
        told = [f for f in preflight(source.source, source.config) if f.code == "column_renamed"]
        assert len(told) == len(NAMES)
        assert "_file as _file__source" in told[0].message
        source.pin()
        source.copy()
        source.execute("comment on column mirrored._file is 'said'")
        for name in NAMES:
            source.execute(CHANGES.format(name))
        source.execute(ALTERED)
        source.catch_up()
        assert [(c.table.name, c.differing, c.problem) for c in source.verify()] == [
            (name, 0, None) for name in NAMES
        ]
        loaded = source.lake_table(TableId("public", "mirrored")).load()
        assert loaded is not None
        columns = {f.name for f in loaded.schema().fields}
        assert {
            "_pos__source",
            "_file__source",
            "_file__source__source",
            "_row_id__source__source",
        } <= columns
        assert not {"_row_id__source", "_commit_snapshot_id"} & columns
        (done,) = maintain(source.pipeline, lambda: source.session, source.tables[:1])
        assert (done.problem, done.compacted.slices > 0) == (None, True)
        loaded = source.lake_table(TableId("public", "mirrored")).load()
        assert loaded is not None
        assert loaded.schema().find_field("_file__source").doc == "said"
