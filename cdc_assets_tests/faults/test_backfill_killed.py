"""A backfill under traffic, while flusher, follower and the backfill itself are killed."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psycopg
import pytest

from cdc_assets.backfill.request import request
from cdc_assets.log import backfills as record
from cdc_assets_tests.support.backfills import T, damage
from cdc_assets_tests.support.lake import Lake, NewLake
from cdc_assets_tests.support.threads import beside

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

_ROWS, _KILLS, _PATIENCE_SECONDS = 30_000, 9, 240.0
# A key of a domain, and values that updates leave out.
SETUP = f"""
create domain ident as int check (value is not null);
create table t (id ident primary key, v text, big text);
alter table t alter big set storage external;
insert into t
select i, 'v' || i, case when i % 30 = 0 then repeat('long ', 600) || i end
  from generate_series(1, {_ROWS}) i;
"""
_STATEMENTS = (
    "update t set v = v || '.' where id between {n} and {n} + 9",
    "update t set big = repeat('new ', 700) where id = {n}",
    "delete from t where id = {n}",
    "insert into t values ({n}, 'again', repeat('more ', 600)) on conflict do nothing",
    "update t set id = {twin} where id = {n} and not exists (select from t where id = {twin})",
    "update t set id = {n} where id = {twin} and not exists (select from t where id = {n})",
)
_COMMANDS = {
    "flusher": ("flush",),
    "follower": ("materialize", "--follow"),
    "backfill": ("backfill", "resume", "1", "--wait"),
}


# A backfill of so few rows has one chunk otherwise.
_MAIN = """
from cdc_assets.backfill import planning
from cdc_assets.cli.main import cli
planning._CHUNK_PAGES = 16
cli()
"""


class _Party:
    """One of the three, in a process of its own, which is started again once it is killed."""

    def __init__(self, file: Path, name: str) -> None:
        self.name, self._log = name, file.parent / f"{name}.log"
        self._arguments = [sys.executable, "-c", _MAIN, "--config", str(file)]
        self._process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            arguments = [*self._arguments, *_COMMANDS[self.name]]
            return subprocess.Popen(arguments, stdout=log, stderr=log)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._process = self._started()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        print(self.name, self._log.read_text()[-3000:])  # noqa: T201 - shown if it fails


@contextmanager
def parties(source: Lake, folder: Path) -> Iterator[list[_Party]]:
    file = folder / "source.json"
    file.write_text(source.config.dump())
    with ExitStack() as ends:
        begun = []
        for name in _COMMANDS:
            begun.append(_Party(file, name))
            ends.callback(begun[-1].end)
        yield begun


def _writer(source: Lake, chance: random.Random) -> Callable[[threading.Event], None]:
    def write(stop: threading.Event) -> None:
        with psycopg.connect(source.pipeline.source_dsn, autocommit=True) as connection:
            while not stop.wait(0.02):
                n = chance.randrange(1, _ROWS)
                statement = chance.choice(_STATEMENTS).format(n=n, twin=_ROWS + n)
                connection.execute(statement.encode())

    return write


@pytest.mark.parametrize("seed", [1])
def test_whichever_is_killed_the_backfill_ends_with_the_truth(
    copied_lake: NewLake, tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    with copied_lake(SETUP, {"name": "t", "chunk_pages": 16}) as source:
        damage(
            source,
            "delete from lake.src.t where id % 7 = 0",
            "update lake.src.t set v = 'wrong' where id % 11 = 0",
            "update lake.src.t set big = null where id % 60 = 0",
        )
        assert not source.equal(T)
        store = source.pipeline.store
        request(source.pipeline, T)
        with beside(_writer(source, chance)), parties(source, tmp_path) as begun:
            for _ in range(_KILLS):
                time.sleep(chance.uniform(3, 8))
                chance.choice(begun).kill()
            deadline = time.monotonic() + _PATIENCE_SECONDS
            while record.backfill(store, 1).state != "done":
                assert time.monotonic() < deadline, record.backfill(store, 1)
                time.sleep(0.5)
        source.catch_up()
        assert source.equal(T)
        assert record.backfill(store, 1).differed > 0
