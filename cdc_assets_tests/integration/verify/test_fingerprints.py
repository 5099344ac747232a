"""Fingerprints: equal for equal rows, in any order; and different for other rows."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.lake.spark.session import connected
from cdc_assets.verify.difference import Fingerprint, fingerprints

pytestmark = pytest.mark.spark

Row = tuple[str | None, ...]
# Each row, and how often it counts: a deletion of a keyless table takes one away.
Rows = list[tuple[Row, int]]


@pytest.fixture(scope="module")
def session(spark_server: SparkServer) -> Iterator[SparkSession]:
    opened = connected(spark_server.ensure())
    yield opened
    opened.stop()


def found(session: SparkSession, groups: Sequence[Rows]) -> list[Fingerprint]:
    rows = [(n, *row, times) for n, group in enumerate(groups) for row, times in group]
    frame = session.createDataFrame(rows, "n int, a string, b string, c string, times long")
    cells = [F.col(name) for name in "abc"]
    by_group = {n: s for n, *s in fingerprints(frame, cells, F.col("times"), "n").collect()}
    return [Fingerprint.of(by_group.get(n, (0,) * 5)) for n in range(len(groups))]


def counted(rows: Rows) -> Counter[Row]:
    total = Counter[Row]()
    for row, times in rows:
        total[row] += times
    return Counter({row: times for row, times in total.items() if times})


def test_rows_that_look_alike_have_other_fingerprints(session: SparkSession) -> None:
    alike: list[Rows] = [
        [(row, 1)]
        for row in (
            ("x", None, None),
            (None, "x", None),
            (None, None, "x"),
            ("", "x", None),
            ("x", "", None),
            ("x", "", ""),
            ("xx", None, None),
            ("x", "x", None),
            ("null", None, None),
            (None, None, None),
        )
    ]
    prints = found(session, [[], *alike])
    assert len(set(prints)) == len(alike) + 1
    assert prints[0] == Fingerprint()


def test_equal_rows_in_any_order_have_equal_fingerprints_and_others_have_not(
    session: SparkSession,
) -> None:
    rng = random.Random(7)
    texts = [None, "", "a", "ab", "b"]

    def some() -> Rows:
        rows = [tuple(rng.choices(texts, k=3)) for _ in range(rng.randrange(4))]
        return [(row, rng.choice((1, 1, 2, -1))) for row in rows]

    groups = [some() for _ in range(60)]
    groups += [rng.sample(group, len(group)) for group in groups]
    groups += [[*group, (("a", "b", "a"), 1), (("a", "b", "a"), -1)] for group in groups[:60]]
    prints = found(session, groups)
    equal = 0
    for one, other in combinations(range(len(groups)), 2):
        same = counted(groups[one]) == counted(groups[other])
        assert (prints[one] == prints[other]) == same, (groups[one], groups[other])
        equal += same
    assert equal >= 180


def test_the_fingerprint_of_parts_is_the_whole_s(session: SparkSession) -> None:
    one: Rows = [(("a", None, "c"), 1), (("a", None, "c"), 1)]
    other: Rows = [(("b", "", None), 1)]
    first, second, whole = found(session, [one, other, one + other])
    assert first + second == whole
    assert (first.rows, whole.rows) == (2, 3)
