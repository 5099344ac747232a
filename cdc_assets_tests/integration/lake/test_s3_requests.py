"""What a merge asks of an object store: each request takes its time while the table is locked."""

from __future__ import annotations

from collections import Counter
from typing import Any
from urllib.parse import urlsplit

import pytest

from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support.lake import NewLake
from cdc_assets_tests.support.s3 import ObjectStore

pytestmark = pytest.mark.spark

TABLE = TableId("public", "t")
SETUP = """
    create table t (id int primary key, v text);
    insert into t select i, 'x' from generate_series(1, 100) i
"""
_BEFORE, _MERGES = 3, 2


def test_a_merge_reads_no_manifest_twice_and_writes_small_files_at_once(
    copied_lake: NewLake, s3: ObjectStore
) -> None:
    settings = {
        "s3": s3.settings,
        "staging": {"uri": "s3://bucket/staging"},
        "lake": {"catalog": {"warehouse": "s3://bucket/warehouse"}},
    }
    with copied_lake(SETUP, "t", **settings) as source:

        def merge(number: int) -> None:
            source.execute(f"update t set v = '{number}' where id <= 10")
            source.execute(f"insert into t values ({1000 + number}, 'new')")
            source.flush()
            source.drain(TABLE)

        for number in range(_BEFORE):
            merge(number)
        asked, read = Counter[str](), Counter[str]()

        def watch(request: Any) -> None:
            asked[request.command] += 1
            path = urlsplit(request.path).path
            if request.command == "GET" and path.endswith(".avro") and "/snap-" not in path:
                read[path] += 1

        s3.watch = watch
        for number in range(_MERGES):
            merge(_BEFORE + number)
        assert read and max(read.values()) == 1
        assert asked["POST"] == 0, "a small file was written in parts"
        assert [found.equal for found in source.verify()] == [True]
