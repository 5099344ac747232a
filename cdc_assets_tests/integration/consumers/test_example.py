"""The example of the guide: a DuckDB file that a program keeps current."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import duckdb
import pytest

import cdc_assets
from cdc_assets_tests.support.lake import Lake, NewLake

pytestmark = pytest.mark.spark

EXAMPLE = Path(cdc_assets.__file__).parents[1] / "docs" / "examples" / "duckdb_copy.py"
SETUP = """
create table t (id int, part text, v text, big text, primary key (id, part));
alter table t alter big set storage external;
insert into t select i, 'p', 'copied', repeat('x', 3000) from generate_series(1, 200) i;
"""


def test_a_duckdb_file_is_kept_current(copied_lake: NewLake, tmp_path: Path) -> None:
    main = runpy.run_path(str(EXAMPLE))["main"]
    file = str(tmp_path / "copy.duckdb")

    def copied(source: Lake) -> list[tuple[Any, ...]]:
        main(source.config, "search", file, wait=False)
        with duckdb.connect(file) as found:
            return sorted(found.execute('select * from "public.t"').fetchall(), key=repr)

    def there(source: Lake) -> list[tuple[Any, ...]]:
        return sorted(source.execute("select * from t"), key=repr)

    with copied_lake(SETUP, "t", consumers=[{"name": "search"}]) as source:
        assert copied(source) == there(source)
        source.execute("update t set v = 'w' where id < 50; update t set part = 'q' where id < 9")
        source.execute("delete from t where id > 150; insert into t values (999, 'p', null, '')")
        source.flush()
        assert copied(source) == there(source)
        source.execute("alter table t add w int default 7; update t set w = 8 where id = 60")
        source.catch_up()
        assert copied(source) == there(source)
        source.execute("alter table t alter w type bigint; update t set w = 1::int8 << 40")
        source.catch_up()
        assert copied(source) == there(source)
        source.execute("truncate t; insert into t values (1, 'p', 'after', null, 1)")
        source.flush()
        assert copied(source) == there(source)
