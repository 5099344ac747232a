"""Money moves between two tables all the time; at each mark its sum over the tags is the same."""

from __future__ import annotations

import random
import threading
from contextlib import ExitStack, suppress

import psycopg
import pytest

from cdc_assets.config.addresses import source_dsn
from cdc_assets.errors import Fenced
from cdc_assets.lake.spark.session import open_session
from cdc_assets.marks.make import mark
from cdc_assets.materializer.drain import drain
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support.flusher import flushing
from cdc_assets_tests.support.lake import Lake, NewLake
from cdc_assets_tests.support.threads import beside
from cdc_assets_tests.support.waiting import wait_for

pytestmark = pytest.mark.spark

MARKS, ACCOUNTS, EACH = 50, 20, 1_000
A, B = TableId("public", "a"), TableId("public", "b")
SETUP = f"""
create table a (id int primary key, n int not null);
insert into a select i, {EACH} from generate_series(1, {ACCOUNTS}) i;
create table b (id int primary key, n int not null);
insert into b select i, {EACH} from generate_series(1, {ACCOUNTS}) i;
"""


def test_at_each_mark_the_sum_over_the_tags_is_constant(copied_lake: NewLake) -> None:
    with copied_lake(SETUP, "public.a", "public.b") as source, ExitStack() as stack:
        config = source.config
        money = stack.enter_context(psycopg.connect(source_dsn(config)))
        other = stack.enter_context(Pipeline.open(config))
        session = open_session(config)
        stack.callback(session.stop)
        rng = random.Random(7)

        def move(stop: threading.Event) -> None:
            while not stop.wait(0.005):
                amount, source, target = (rng.randint(1, most) for most in (9, ACCOUNTS, ACCOUNTS))
                money.execute("update a set n = n - %s where id = %s", (amount, source))
                money.execute("update b set n = n + %s where id = %s", (amount, target))
                money.commit()

        def merge(stop: threading.Event) -> None:
            while not stop.is_set():
                for table in (A, B):
                    with suppress(Fenced):
                        drain(other, session, table)

        progress = stack.enter_context(flushing(config))
        wait_for(lambda: progress.state == "streaming")
        at_marks, merely_current = list[int](), list[int]()
        with beside(move), beside(merge):
            for number in range(MARKS):
                found = mark(source.pipeline, source.session, f"m{number}")
                assert [t.state for t in found.tables] == ["tagged", "tagged"]
                merely_current.append(total(source, ""))
                at_marks.append(total(source, f"version as of 'mark_m{number}'"))
        assert at_marks == [2 * ACCOUNTS * EACH] * MARKS
        assert {*merely_current} != {2 * ACCOUNTS * EACH}, "no tag could have torn: more traffic"


def total(source: Lake, when: str) -> int:
    parts = [
        f"select sum(n) as s from {source.lake_table(table).sql_name} {when}" for table in (A, B)
    ]
    [row] = source.session.sql(f"select sum(s) from ({' union all '.join(parts)})").collect()
    return int(row[0])
