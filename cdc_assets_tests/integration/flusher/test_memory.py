"""Bounded memory: all processes of the flusher together, at the default settings.

The budgets are of the sum of the processes' own peaks (``support/peak_memory.py``). The short
versions run always, the full ones by ``make soak``; the figures that each prints are what was
measured.

A transaction arrives after its commit (protocol 1): what it holds before is the server's business
(``logical_decoding_work_mem``, and files beyond it).
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from psycopg import sql

from cdc_assets.postgres.slots import current_lsn
from cdc_assets_tests.support.flusher import Bench, flushing, start_flusher
from cdc_assets_tests.support.peak_memory import PeakMemory
from cdc_assets_tests.support.waiting import wait_for

MB = 1_000_000


def _peak(source: Bench, tables: Sequence[str], statements: Sequence[str], seconds: float) -> int:
    """Bytes: the backlog that the statements make is there when the flusher starts."""
    source.flush(source.config(*tables))
    for statement in statements:
        source.execute(statement)
    written = current_lsn(source.connection)
    child = start_flusher(source.config_file(*tables))
    watch = PeakMemory(child.pid)
    try:
        wait_for(lambda: child.poll() is not None or source.flushed() >= written, seconds)
        assert child.poll() is None, (source.folder / "flusher.log").read_text()[-2000:]
    finally:
        peaks = watch.close()
        child.terminate()
        child.wait(30)
    print(f"peaks: {[round(peak / MB) for peak in peaks]} MB, {round(sum(peaks) / MB)} together")  # noqa: T201
    return sum(peaks)


def _staged(source: Bench) -> int:
    return int(
        source.execute("select coalesce(sum(row_count), 0) from _pg2iceberg.log_index")[0][0]
    )


def _one_transaction(source: Bench, rows: int, seconds: float) -> int:
    source.execute("create table t (id int primary key, v text, at timestamptz default now())")
    peak = _peak(
        source,
        ["public.t"],
        [f"insert into t select g, repeat(md5(g::text), 5) from generate_series(1, {rows}) g"],
        seconds,
    )
    assert _staged(source) == rows
    assert len(source.entries("public.t")) >= rows // 500_000  # in parts
    # Registered in one transaction, at one LSN.
    assert source.execute(
        "select count(distinct registered_at), count(distinct flushable_lsn)"
        " from _pg2iceberg.log_index"
    ) == [(1, 1)]
    return peak


def _large_value(source: Bench, size: int, unit: str = "0123456789") -> int:
    source.execute("create table t (id int primary key, v text)")
    source.execute("alter table t alter v set storage external")
    literal = sql.Literal(unit).as_string(source.connection)
    peak = _peak(
        source,
        ["public.t"],
        [
            f"insert into t select 1, repeat({literal}, {size // len(unit)})",
            "insert into t values (2)",
        ],
        300,
    )
    first, second = source.log("public.t")
    assert first.data["v"] == unit * (size // len(unit))
    assert second.data["id"] == "2"
    return peak


def _budget(largest: int) -> int:
    """For a largest value: the receiver's buffer is twice as large, the decoder has it five times.

    Those five are the message, its values, these escaped, the pool that the row is put together
    from, the row.
    """
    return 300 * MB + 7 * largest


def _small_transactions(source: Bench, count: int, seconds: float) -> int:
    source.execute("create table t (id int primary key, v text)")
    source.execute("""
        create procedure fill(count int) language plpgsql as $$
        begin
            for number in 1 .. count loop
                insert into t values (number, 'x');
                commit;
            end loop;
        end $$
    """)
    peak = _peak(source, ["public.t"], [f"call fill({count})"], seconds)
    assert _staged(source) == count
    return peak


def _many_tables(source: Bench, count: int, seconds: float) -> int:
    names = [f"t{number}" for number in range(count)]
    for name in names:
        source.execute(f"create table {name} (id int primary key, v text)")
    peak = _peak(
        source,
        [f"public.{name}" for name in names],
        [f"insert into {name} select g, md5('x') from generate_series(1, 50) g" for name in names],
        seconds,
    )
    assert _staged(source) == 50 * count
    return peak


def test_a_large_transaction(source: Bench) -> None:
    assert _one_transaction(source, 500_000, 200) < 500 * MB


def test_a_value_of_20_mb(source: Bench) -> None:
    assert _large_value(source, 20 * MB) < _budget(20 * MB)


def test_a_value_of_20_mb_to_be_escaped(source: Bench) -> None:
    unit = 'abcd"\n\t\\'
    escaped = 20 * MB * len(json.dumps(unit)[1:-1]) // len(unit)
    assert _large_value(source, 20 * MB, unit) < _budget(escaped)


def test_many_small_transactions(source: Bench) -> None:
    assert _small_transactions(source, 10_000, 200) < 500 * MB


def test_many_tables(source: Bench) -> None:
    assert _many_tables(source, 100, 200) < 500 * MB


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_transaction_of_five_million_rows(source: Bench) -> None:
    assert _one_transaction(source, 5_000_000, 1200) < 700 * MB


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_value_of_200_mb(source: Bench) -> None:
    assert _large_value(source, 200 * MB) < _budget(200 * MB)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_transactions(source: Bench) -> None:
    assert _small_transactions(source, 100_000, 1200) < 500 * MB


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_two_thousand_tables(source: Bench) -> None:
    assert _many_tables(source, 2_000, 1200) < 500 * MB


def test_an_abandoned_transaction_leaves_orphans_only(source: Bench) -> None:
    """The connection is lost while a large transaction arrives: it is sent again as a whole."""
    source.execute("create table t (id int primary key, v text)")
    config = source.config("public.t", flush_bytes="1MB", flush_interval="50ms")
    source.flush(config)
    rows = 300_000

    def files() -> int:
        return len(list(source.folder.rglob("*.parquet")))

    source.execute(f"insert into t select g, repeat('x', 100) from generate_series(1, {rows}) g")
    written = current_lsn(source.connection)
    with flushing(config):
        wait_for(lambda: files() > 2)
        assert source.entries("public.t") == []
        source.terminate("flusher")
        wait_for(lambda: source.flushed() >= written, 120)
    assert files() > len(source.entries("public.t"))  # those of the first attempt
    assert source.ids() == [str(number) for number in range(1, rows + 1)]
