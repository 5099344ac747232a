"""Columns of a lake table that somebody else alters, and a configuration that changes under it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from cdc_assets.errors import TableProblem
from cdc_assets.materializer.drain import drain
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support.lake import Lake, NewLake

pytestmark = pytest.mark.spark

NAMES = (
    *("renamed", "exchanged", "widened", "dropped"),
    *("set_back", "excluded", "included", "retyped"),
)
SETUP = "".join(
    f"create table {name} (id int primary key, v text, w text, n int);"
    f" insert into {name} select i, 'v' || i, 'w' || i, i from generate_series(1, 5) i;"
    for name in NAMES
)


@pytest.fixture
def source(copied_lake: NewLake) -> Iterator[Lake]:
    tables = [{"name": name} for name in NAMES]
    tables[NAMES.index("included")] |= {"columns": {"exclude": ["w"]}}  # type: ignore[dict-item]
    with copied_lake(SETUP, *tables) as opened:
        yield opened


def drained(source: Lake, name: str, **columns: Any) -> None:
    """Apply a change, by a process whose configuration has ``columns`` for the table."""
    table = TableId("public", name)
    source.execute(f"update {name} set v = v || '!' where id < 3")
    source.flush()
    data = json.loads(source.config.dump())
    data["tables"][NAMES.index(name)]["columns"] |= columns
    with Pipeline.open(type(source.config).model_validate(data)) as pipeline:
        drain(pipeline, source.session, table)


def refused(source: Lake, name: str, why: str, **columns: Any) -> None:
    with pytest.raises(TableProblem, match=why):
        drained(source, name, **columns)
    row = source.row(TableId("public", name))
    assert row.state == "parked"
    assert why in str(row.reason) and "cdc-assets resync" in str(row.reason)


def test_what_others_alter_is_put_right_or_parked(source: Lake) -> None:
    def alter(name: str, *changes: str) -> None:
        for change in changes:
            source.session.sql(f"alter table lake.src.{name} {change}")

    # Columns are known by their ids, from the copy on.
    alter("renamed", "rename column v to mail")
    drained(source, "renamed")
    alter("renamed", "rename column w to mail")
    alter("exchanged", *(f"rename column {a} to {b}" for a, b in ("vx", "wv", "xw")))
    drained(source, "exchanged")
    alter("widened", "alter column n type bigint", "add column note string")
    drained(source, "widened")
    found = {c.table.name: c for c in source.verify()}
    for name in ("renamed", "exchanged", "widened"):
        assert found[name].equal, found[name]

    alter("dropped", "drop column w")
    refused(source, "dropped", "no column w any more")

    table = TableId("public", "set_back")
    drained(source, "set_back")
    before = source.lake_table(table).state().snapshot_id
    source.execute("alter table set_back add column added text default 'filled'")
    drained(source, "set_back")
    source.session.sql(f"call lake.system.rollback_to_snapshot('lake.src.set_back', {before})")
    refused(source, "set_back", "before its columns were changed")

    # A configuration that names no column that the table has changes nothing.
    drained(source, "excluded", exclude=["later"], types={"v": "string"})
    refused(source, "excluded", "made with column w", exclude=["w"])
    refused(source, "included", "made without column w", exclude=[])
    refused(source, "retyped", "made with column n as int", types={"n": "string"})
