"""Rows of a page that are far larger, together, than a part should be."""

from __future__ import annotations

from typing import Any

import pytest

from cdc_assets.backfill import reader
from cdc_assets_tests.support.backfills import T, backfilled, damage
from cdc_assets_tests.support.lake import NewLake

pytestmark = pytest.mark.spark

SETUP = """
create table t (id int primary key, big text);
alter table t alter big set storage external;
insert into t select i, repeat('x', case when i % 3 = 0 then 10 else 30000 end)
  from generate_series(1, 24) i;
"""


def test_the_rows_of_a_page_are_read_in_parts(
    new_lake: NewLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "PART_BYTES", 5_000)
    parts, read = list[reader.Part](), reader._Reader._read

    def noted(self: Any, *about: Any) -> reader.Part | None:
        if (part := read(self, *about)) is not None:
            parts.append(part)
        return part

    monkeypatch.setattr(reader._Reader, "_read", noted)
    with new_lake(SETUP, "t") as source:
        source.pin()
        source.copy()
        assert source.execute("select count(distinct (ctid::text::point)[0]) from t") == [(1,)]
        damage(source, "update lake.src.t set big = 'wrong' where id % 2 = 0")
        assert backfilled(source).state == "done"
        assert source.equal(T)
        assert sum(len(part.keys) for part in parts) == 24
        # Values of 30 kB, above four times a part's size: one at a time.
        assert max(part.data.nbytes for part in parts) < 2 * 30_000
