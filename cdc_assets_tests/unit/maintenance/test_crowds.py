"""When a table's tiny files are looked at: never so that merges wait for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from cdc_assets.maintenance import crowds
from cdc_assets.maintenance.crowds import CROWD, Crowds
from cdc_assets.postgres.names import TableId

LOOK_SECONDS = 3.0


class Tables:
    """Tables of one worker, each with so many files; a look takes a while and leaves one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.looks = 1000.0, list[TableId]()
        self.crowds = Crowds()
        self.files = dict[TableId, int]()
        monkeypatch.setattr(crowds, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(crowds, "_thinned", self._look)

    def _look(self, _pipeline: Any, _session: Any, table: TableId) -> int:
        self.looks.append(table)
        self.now += LOOK_SECONDS
        self.files[table] = 1
        return 1

    def merge(self, table: TableId, files: int = 1, merges: int = 1) -> None:
        self.files[table] = self.files.get(table, 1) + files
        if self.crowds.is_crowd(table, self.files[table], merges):
            self.crowds.thin_out(cast("Any", None), cast("Any", None), table)


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Tables:
    return Tables(monkeypatch)


def test_a_crowd_is_looked_at_once_a_minute_at_most(tables: Tables) -> None:
    t = TableId("public", "t")
    for _ in range(2 * CROWD):
        tables.merge(t)
        tables.now += 0.1
    assert tables.looks == [t]
    tables.now += 60.0
    tables.merge(t)
    assert tables.looks == [t, t]


def test_many_tables_take_a_fifth_of_a_worker_at_most(tables: Tables) -> None:
    began, many = tables.now, [TableId("public", f"t{i}") for i in range(50)]
    for _ in range(12 * CROWD):
        for table in many:
            tables.merge(table)
            tables.now += 0.1
    took = tables.now - began
    assert len(set(tables.looks)) == len(many)  # each gets its turn
    assert len(tables.looks) * LOOK_SECONDS <= took / 5 + LOOK_SECONDS


def test_a_table_of_many_partitions_is_left_to_maintenance(tables: Tables) -> None:
    spread, other = TableId("public", "spread"), TableId("public", "other")
    for _ in range(2 * CROWD):
        tables.merge(spread, files=50)
        tables.merge(other, files=10, merges=2)
        tables.now += 10.0
    assert set(tables.looks) == {other}
