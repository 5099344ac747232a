"""What a follower makes of a turn that failed: whose failure it is, and when it tries again."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import psycopg
import pytest
from pyspark.errors import PySparkException

from cdc_assets.errors import EnvironmentProblem, TableProblem
from cdc_assets.materializer.workers.follower import Follower, Listener
from cdc_assets.materializer.workers.turns import Turn, Turns
from cdc_assets.postgres.names import TableId

T = TableId("public", "t")


class World:
    """A follower and turns that are over with an error."""

    def __init__(self) -> None:
        self.follower = Follower([T], threading.Event(), Listener(lambda _: None))
        self.told = list[str]()
        self.turns = SimpleNamespace(usable=True, offsets={T: 5}, others={}, tell=self._tell)

    def _tell(self, _table: TableId, problem: str) -> None:
        self.told.append(problem)

    def judge(self, error: Exception | None) -> None:
        self.follower._judge(Turn(T, None, error), cast("Turns", self.turns))

    def look(self, **found: Any) -> None:
        self.turns.__dict__.update(found)
        self.follower._forget_mended(cast("Turns", self.turns))

    @property
    def waits(self) -> float:
        failure = self.follower._failures.get(T)
        return 0.0 if failure is None else failure.again_at - time.monotonic()


def test_a_table_s_own_error_is_told_and_stops_no_other() -> None:
    world = World()
    for error in (
        TableProblem(T, "it can't be"),
        PySparkException("a file is gone"),
        psycopg.errors.InsufficientPrivilege("no right"),
        psycopg.errors.InvalidTextRepresentation("a value"),
        RuntimeError("a defect"),
    ):
        world.judge(error)
    assert len(world.told) == 5
    assert all("public.t" in said for said in world.told)
    assert world.waits > 150  # 10 s, 20 s, 40 s, 80 s, 160 s


@pytest.mark.parametrize(
    "error",
    [
        PySparkException("x"),
        psycopg.OperationalError("x"),
        psycopg.errors.ReadOnlySqlTransaction("x"),
        psycopg.InterfaceError("x"),
        EnvironmentProblem("x", "y"),
    ],
)
def test_what_is_lost_for_all_tables_is_no_table_s_fault(error: Exception) -> None:
    world = World()
    world.turns.usable = not isinstance(error, PySparkException)
    with pytest.raises(type(error)):
        world.judge(error)
    assert not world.told
    assert not world.waits


def test_a_failing_table_that_was_mended_waits_no_longer() -> None:
    world = World()
    world.judge(TableProblem(T, "x"))
    world.look(offsets={}, others={T: 5})
    assert world.waits
    world.look(others={T: 6})  # by hand, or by another worker
    assert not world.waits
    world.turns.offsets = {T: 6}
    world.judge(TableProblem(T, "x"))
    world.look(offsets={}, others={})  # it is copied anew
    assert not world.waits


def test_success_forgets_failures() -> None:
    world = World()
    world.judge(TableProblem(T, "x"))
    world.judge(None)
    assert not world.waits
