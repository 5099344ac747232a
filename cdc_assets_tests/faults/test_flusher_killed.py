"""SIGKILL at random points: the log has every change that committed, once, in commit order."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest

from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets_tests.flusher_support import Bench, bench, start_flusher

ROUNDS = 8
WRITERS = 3


@pytest.fixture
def source(postgres: EmbeddedPostgres, tmp_path: Path) -> Iterator[Bench]:
    dsn = postgres.dsn()
    assert dsn is not None
    with bench(dsn, "f_killed", tmp_path) as made:
        yield made


def _write(dsn: str, writer: int, stop: threading.Event) -> None:
    """Transactions of 1 to 400 changes, some rolled back; ``n`` counts a writer's own rows."""
    chance, n = random.Random(writer), 0
    with psycopg.connect(dsn) as connection:
        while not stop.is_set():
            size = chance.choice([1, 1, 2, 20, 400])
            gone = chance.random() < 0.1
            connection.execute(
                "insert into t select %s, g, %s from generate_series(%s::int, %s::int) g",
                (writer, "gone" if gone else "kept", n, n + size - 1),
            )
            if chance.random() < 0.3:
                connection.execute(
                    "update t set v = 'again' where w = %s and n between %s and %s",
                    (writer, n, n + 3),
                )
            if chance.random() < 0.1:
                connection.execute("delete from t where w = %s and n = %s", (writer, n - 1))
            if gone:
                connection.rollback()
            else:
                connection.commit()
                n += size
            stop.wait(0.002)


@pytest.mark.parametrize("victim", ["receiver", "decoder"])
def test_killed_anywhere_every_change_is_in_the_log_once(source: Bench, victim: str) -> None:
    source.execute("create table t (w int, n int, v text, primary key (w, n))")
    options = {"flush_interval": "20ms", "flush_bytes": "100kB"}
    source.flush(source.config("public.t", **options))
    stop, chance = threading.Event(), random.Random(11)
    writers = [threading.Thread(target=_write, args=(source.dsn, w, stop)) for w in range(WRITERS)]
    for thread in writers:
        thread.start()
    try:
        for _ in range(ROUNDS):
            child = start_flusher(source.config_file("public.t", **options))
            time.sleep(chance.uniform(0.5, 3.5))
            if victim == "decoder":
                decoders = psutil.Process(child.pid).children()  # none yet, perhaps
                for decoder in decoders:
                    decoder.kill()
                assert not decoders or child.wait(30) != 0
            child.kill()
            child.wait()
    finally:
        stop.set()
        for thread in writers:
            thread.join()
    source.flush(source.config("public.t", **options))

    rows = source.log("public.t")
    replayed: dict[tuple[str, str], str] = {}
    inserted: dict[str, list[int]] = {}
    for row in rows:
        key = (row.data["w"], row.data["n"])
        if row.op == "I":
            assert key not in replayed
            inserted.setdefault(key[0], []).append(int(key[1]))
        if row.op == "D":
            del replayed[key]
        else:
            replayed[key] = row.data["v"]
    for numbers in inserted.values():
        assert numbers == list(range(len(numbers)))  # each once, in order, none of a rollback
    table = source.execute("select w::text, n::text, v from t")
    assert replayed == {(w, n): v for w, n, v in table}
    assert [(r.commit_lsn, r.lsn) for r in rows] == sorted((r.commit_lsn, r.lsn) for r in rows)
    assert len(rows) > 5_000
