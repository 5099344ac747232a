"""A table that is merged into again and again, and maintained now and then, stays small.

Real changes by a real flusher. `CYCLES=500` cycles are a soak; sixteen of them run with every test.
"""

from __future__ import annotations

import json
import logging
import os
import random
import time

import pytest

from cdc_assets.maintenance.run import Maintained, maintain
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.slots import current_lsn
from cdc_assets_tests.support.flusher import flushing
from cdc_assets_tests.support.lake import Lake, NewLake
from cdc_assets_tests.support.waiting import wait_for

pytestmark = [pytest.mark.spark, pytest.mark.timeout(7200)]

logger = logging.getLogger(__name__)

T = TableId("public", "t")
ROWS, EVERY = 20_000, 15
SETUP = f"""
create table t (id bigint primary key, n int, v text);
insert into t select i, i, md5(i::text) from generate_series(1, {ROWS}) i;
"""
# What is kept is what the settings say, plus what came since the last maintenance: two snapshots a
# merge, of a list of manifests and a metadata file each.
KEEP = 5


@pytest.mark.parametrize(
    "number",
    [16, pytest.param(int(os.environ.get("CYCLES", "500")), marks=pytest.mark.soak)],
    ids="{}-cycles".format,
)
def test_files_and_metadata_stay_bounded(number: int, copied_lake: NewLake) -> None:
    settings = {"keep_snapshots": {"count": KEEP, "age": "0s"}, "staged_grace": "0s"}
    with copied_lake(
        SETUP,
        "t",
        maintenance=settings,
        staging={"flush_interval": "100ms"},
    ) as source:
        random_ = random.Random(number)
        seen: list[Maintained] = []
        with flushing(source.config):
            for i in range(number):
                _change(source, random_, i)
                _merge(source)
                if i % EVERY == EVERY - 1 or i == number - 1:
                    (found,) = maintain(
                        source.pipeline, lambda: source.session, [T], thorough=False
                    )
                    assert found.problem is None
                    seen.append(found)
        assert source.rows(T) == sorted(source.execute("select * from t"), key=repr)
        if number > 16:  # figures for a person, no test of anything
            _report(source, number, seen)
        for found in seen:
            assert found.data_files < 10
            assert found.deleted_rows <= 0.2 * ROWS
            assert found.snapshots <= KEEP + 1
            assert found.stored is not None
            assert found.stored.files < 300
            assert found.stored.metadata_bytes < 2_000_000
            assert found.staged.files >= 1  # every file of the cycles since the last one
        assert len(source.pipeline.store.entries(T, 0)) == 0


def _change(source: Lake, random_: random.Random, i: int) -> None:
    ids = ", ".join(str(random_.randrange(1, ROWS)) for _ in range(200))
    source.execute(f"update t set n = {i}, v = md5('{i}' || id) where id in ({ids})")
    source.execute(
        f"insert into t select {ROWS} + {i} * 10 + g, {i}, 'new' from generate_series(1, 10) g"
    )
    source.execute(
        f"delete from t where id in (select id from t where id % 997 = {i % 997} limit 10)"
    )


def _merge(source: Lake) -> None:
    now = current_lsn(source.source)
    wait_for(lambda: (at := source.pipeline.store.flushed_lsn()) is not None and at >= now)
    source.drain(T)


def _report(source: Lake, number: int, seen: list[Maintained]) -> None:
    """Log figures: what there is, and a scan against a scan of a freshly written copy."""
    table = source.lake_table(T).sql_name
    source.session.sql(f"create table lake.src.fresh using iceberg as select * from {table}")

    def scan(name: str) -> float:
        times = []
        for _ in range(7):
            began = time.monotonic()
            source.session.sql(f"select sum(hash(id, n, v)) from {name}").collect()
            times.append(time.monotonic() - began)
        return sorted(times)[len(times) // 2]

    last = seen[-1]
    ratio = scan(table) / scan("lake.src.fresh")
    most = {
        "data_files": max(s.data_files for s in seen),
        "stored_files": max(s.stored.files for s in seen if s.stored),
        "metadata_bytes": max(s.stored.metadata_bytes for s in seen if s.stored),
        "maintain_seconds": round(max(s.seconds for s in seen), 1),
    }
    figures = {"cycles": number, "scan_ratio": round(ratio, 2), "most": most}
    logger.info("%s", json.dumps({**figures, "last": last.to_json()}))
