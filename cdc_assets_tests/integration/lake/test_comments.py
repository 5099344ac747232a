"""`comment on` at the source: in the lake table, and in what the UI shows of source and lake."""

from __future__ import annotations

import dagster as dg
import pytest

from cdc_assets.dagster.metadata import table_metadata
from cdc_assets.dagster.names import TableAssets, all_tables
from cdc_assets.dagster.sensors.observe import health
from cdc_assets.maintenance.run import maintain
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support.lake import Lake, NewLake

pytestmark = pytest.mark.spark

ODD = TableId("public", 'x"; drop table y; --')
SETUP = f"""
create table {ODD} (id int primary key, "a`b" text, c numeric(12,2), plain text);
insert into {ODD} values (1, 'one', 1, 'p');
comment on table {ODD} is 'It''s a "table" \\ of things.';
comment on column {ODD}."a`b" is 'First''s `name`; \\n';
comment on column {ODD}.c is 'What it costs.';
create table parts (id int primary key, day date) ;
insert into parts values (1, '2026-01-01');
comment on table parts is 'Partitioned in the lake.';
comment on column parts.day is 'When.';
"""
PARTS = TableId("public", "parts")


def _docs(source: Lake, table: TableId) -> tuple[str | None, dict[str, str | None]]:
    loaded = source.lake_table(table).load()
    assert loaded is not None
    docs = {field.name: field.doc or None for field in loaded.schema().fields}
    return loaded.properties.get("comment"), docs


def _shown(source: Lake, names: TableAssets) -> dict[str, str | None]:
    schema = table_metadata(source.lake_table(names.table), names, 1)["dagster/column_schema"]
    assert isinstance(schema, dg.TableSchema)
    return {column.name: column.description for column in schema.columns}


def test_comments_come_with_the_table_and_follow_their_changes(
    copied_lake: NewLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = (str(ODD), {"name": "parts", "partition_by": ["day"]})
    with copied_lake(SETUP, *tables) as source:
        source.drain_all()
        assert _docs(source, ODD) == (
            'It\'s a "table" \\ of things.',
            {"id": None, "a`b": "First's `name`; \\n", "c": "What it costs.", "plain": None},
        )
        assert _docs(source, PARTS) == ("Partitioned in the lake.", {"id": None, "day": "When."})
        [odd, _] = all_tables(source.config)
        assert _shown(source, odd) == {
            "id": "integer",
            "a`b": "First's `name`; \\n (text)",
            "c": "What it costs. (numeric(12,2))",
            "plain": "text",
        }
        metadata = table_metadata(source.lake_table(ODD), odd, 1)
        assert metadata["comment"] == 'It\'s a "table" \\ of things.'
        snapshots = source.snapshots(ODD)

        monkeypatch.setattr(health, "_observed", {})
        seen = {o.asset_key: o for o in health.observations(source.pipeline, [odd])}
        said = seen[odd.source].metadata
        assert said["comment"].value == 'It\'s a "table" \\ of things.'
        columns = said["columns"].value
        assert isinstance(columns, dg.TableSchema)
        assert [(c.name, c.type, c.description) for c in columns.columns] == [
            ("id", "integer", None),
            ("a`b", "text", "First's `name`; \\n"),
            ("c", "numeric(12,2)", "What it costs."),
            ("plain", "text", None),
        ]
        assert not health.observations(source.pipeline, [odd]), "nothing has changed"
        monkeypatch.setattr(health, "_observed", {})
        monkeypatch.setattr(health, "AT_ONCE", 1)
        both = all_tables(source.config)
        for number in (1, 1, 0):
            assert len(health.observations(source.pipeline, both)) == number

        source.execute(f"comment on table {ODD} is null")
        source.execute(f"comment on column {ODD}.c is null")
        source.execute(f"comment on column {ODD}.plain is 'New.'")
        assert len(health.observations(source.pipeline, [odd])) == 1
        for _ in maintain(source.pipeline, lambda: source.session, source.tables):
            pass
        assert _docs(source, ODD) == (
            None,
            {"id": None, "a`b": "First's `name`; \\n", "c": None, "plain": "New."},
        )
        assert source.snapshots(ODD) == snapshots, "metadata only"
        # The next merge leaves them alone.
        source.execute(f"insert into {ODD} values (2, 'two', 2, 'q')")
        source.catch_up()
        assert _docs(source, ODD)[1]["plain"] == "New."
        assert all(compared.equal for compared in source.verify())
