"""Incremental copies that a test comes between the parts of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pyarrow as pa
import pytest

from cdc_assets.snapshot.pace import Pace
from cdc_assets.snapshot.table_copy import TableCopy
from cdc_assets.snapshot.worker import copy_worker
from cdc_assets_tests.integration.snapshot.sources import T
from cdc_assets_tests.support.lake import Lake

INCREMENTAL = {"strategy": "incremental", "hold_at_most": "0.1s"}
TOAST = """
create table t (id int primary key, v text not null, pad text);
alter table t alter pad set storage external;
insert into t select i, 'old ' || i, repeat('x', case when i % 7 = 0 then 5000 else 100 end)
  from generate_series(1, 20000) i;
delete from t where id <= 2000;
"""


@contextmanager
def between_parts(
    monkeypatch: pytest.MonkeyPatch, do: Callable[[int], object], pages: int = 16
) -> Iterator[None]:
    """``do`` is called after each part, which all have so many pages; in this process."""
    count = iter(range(1_000_000))
    with monkeypatch.context() as patch:
        patch.setattr(Pace, "took", lambda *_: do(next(count)))
        patch.setattr("cdc_assets.snapshot.pace._FIRST", pages)
        yield


def copy_here(source: Lake) -> None:
    """Copy the table in this process, where a test can come between two transactions."""
    row = source.row(T)
    copy = TableCopy(source.pipeline, source.session, row, None, lambda _: None)
    copy.open()
    task = copy.task(None, "test")
    batch = pa.record_batch({"id": [0]})
    found = [each.to_pylist() for each in copy_worker([task])([batch])]
    assert [(each["outcome"], each["detail"]) for [each] in found] == [("done", "")]
    while not copy.step():
        pass
