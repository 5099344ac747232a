"""Writers whose work can be checked against the log afterwards: each change once, in order."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from cdc_assets_tests.support.flusher import Bench

TABLE = "create table t (w int, n int, v text, primary key (w, n))"


def _write(dsn: str, seed: int, writer: int, stop: threading.Event, pause: float) -> None:
    """Transactions of 1 to 400 changes, some rolled back; ``n`` counts a writer's own rows."""
    chance, n = random.Random(f"{seed} {writer}"), 0
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
            stop.wait(pause)


@contextmanager
def writing(
    source: Bench, seed: int = 0, writers: int = 3, pause: float = 0.002
) -> Iterator[threading.Event]:
    """Writers at work on table ``t`` for the length of the block, or until the event is set."""
    stop = threading.Event()
    threads = [
        threading.Thread(target=_write, args=(source.dsn, seed, writer, stop, pause))
        for writer in range(writers)
    ]
    for thread in threads:
        thread.start()
    try:
        yield stop
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def check(source: Bench) -> int:
    """Replay the log of ``t`` against the table; how many rows it has."""
    rows = source.log("public.t")
    replayed: dict[tuple[str | None, str | None], str | None] = {}
    inserted: dict[str | None, list[int]] = {}
    for row in rows:
        key = (row.data["w"], row.data["n"])
        if row.op == "I":
            assert key not in replayed
            inserted.setdefault(key[0], []).append(int(key[1] or -1))
        if row.op == "D":
            del replayed[key]
        else:
            replayed[key] = row.data["v"]
    for numbers in inserted.values():
        assert numbers == list(range(len(numbers)))  # each once, in order, none of a rollback
    table = source.execute("select w::text, n::text, v from t")
    assert replayed == {(w, n): v for w, n, v in table}
    assert [(r.commit_lsn, r.lsn) for r in rows] == sorted((r.commit_lsn, r.lsn) for r in rows)
    paths = [uri for _, _, uri in source.uris("public.t")]
    assert len(set(paths)) == len(paths)
    return len(rows)
