"""SIGKILL at every step of ``state migrate``: never two logs that live, and nothing is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cdc_assets.config.source import SourceConfig
from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.operations.state.migrate import migrate_state, undo_migration
from cdc_assets_tests.conftest import databases
from cdc_assets_tests.faults.killed_at import arm
from cdc_assets_tests.faults.state_killed_at import DONE, UNDONE
from cdc_assets_tests.integration.operations.test_state_migrate import (
    TABLE,
    at,
    is_live,
    rows,
)
from cdc_assets_tests.support.flusher import Bench

# How often a step is passed before the kill: in its midst.
MIDST = {"a constraint is added": 5, "rows are copied": 4}


@pytest.fixture
def other(postgres_servers: Callable[[int], EmbeddedPostgres]) -> Iterator[str]:
    with databases(postgres_servers(16)) as new:
        yield new()


def killed(config: SourceConfig, step: str, dsn: str) -> None:
    """Move the state in a process that kills itself there."""
    child = os.fork()
    if not child:
        try:
            arm({**UNDONE, **DONE}[step], MIDST.get(step, 1))
            migrate_state(config, dsn)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL, step


@pytest.mark.parametrize("undoes", [False, True])
def test_every_step(source: Bench, other: str, tmp_home: Path, undoes: bool) -> None:
    """Moved there and back again, each time by a command that is killed at another step."""
    source.execute(TABLE)
    here, there = source.config("public.t"), at(source, other).config("public.t")
    source.flush(here)
    for number, step in enumerate((*UNDONE, *DONE)):
        source.execute("insert into t values (%s)", number)
        source.flush(here)
        before = rows(source.dsn, source.name)
        killed(here, step, other)
        live = (is_live(here), is_live(there))
        if step in ("the target is looked at", "nothing is done"):
            assert live[0], step  # what is there is empty: nobody has started with it
        else:
            assert live == (False, step == "it lives"), step
        if step in UNDONE and undoes:
            assert undo_migration(here).outcome == ("nothing to undo" if live[0] else "undone")
            assert rows(source.dsn, source.name) == before, step
            assert is_live(here), step
        done = migrate_state(here, other).outcome
        assert done == ("was moved" if step == "it lives" else "moved"), step
        assert (is_live(here), is_live(there)) == (False, True), step
        assert rows(other, source.name) == before, step
        assert not any(rows(source.dsn, source.name).values()), step
        migrate_state(there, source.dsn)
        assert rows(source.dsn, source.name) == before, step
    assert sorted(int(n or 0) for n in source.ids()) == list(range(len([*UNDONE, *DONE])))
