"""A plan's chunks cover every page exactly once, and their keys sort in block order."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc_assets.postgres.ctid import CtidRange, heap_pages, plan_chunks

pages = st.integers(0, 5_000_000)
steps = st.integers(1, 100_000)


@given(pages, steps)
def test_ranges_are_disjoint_contiguous_and_open_ended(pages: int, step: int) -> None:
    plan = plan_chunks(pages, step)
    assert plan[0].first_block == 0
    assert plan[-1].end_block is None
    for left, right in pairwise(plan):
        assert left.end_block == right.first_block > left.first_block


@given(pages, steps)
def test_a_plan_has_at_most_two_thousand_chunks_of_at_least_the_size_asked_for(
    pages: int, step: int
) -> None:
    plan = plan_chunks(pages, step)
    assert 1 <= len(plan) <= 2000
    for chunk in plan[:-1]:
        assert chunk.end_block is not None
        assert chunk.end_block - chunk.first_block >= step


@given(pages, steps, st.integers(1, 9999))
def test_keys_are_read_back_and_sort_in_block_order(pages: int, step: int, epoch: int) -> None:
    plan = plan_chunks(pages, step)
    keys = [chunk.key(epoch) for chunk in plan]
    assert keys == sorted(keys)
    assert [CtidRange.parse(key) for key in keys] == [(epoch, chunk) for chunk in plan]


def test_the_shape_of_keys_and_predicates_is_what_the_design_says() -> None:
    first, last = plan_chunks(4096, 2048)
    assert first.key(1) == "0001:0000000000-0000002048"
    assert last.key(1) == "0001:0000002048-end"
    assert first.predicate == "ctid >= '(0,0)'::tid and ctid < '(2048,0)'::tid"
    assert last.predicate == "ctid >= '(2048,0)'::tid"


@pytest.mark.parametrize("key", ["", "1:0-1", "0001:0000000000-", "0001:0000000000-0000002048x"])
def test_anything_else_is_no_chunk(key: str) -> None:
    with pytest.raises(ValueError, match="is not a chunk"):
        CtidRange.parse(key)


@pytest.mark.parametrize(
    ("pages", "toast", "chunk"),
    [
        (0, 0, 1),
        (10_000, 0, 2048),
        (10_000, 30_000, 2048),
        (10_000, 70_000, 1024),
        (384, 2**18, 11),
    ],
)
def test_a_chunk_has_fewer_pages_where_most_is_in_toast(pages: int, toast: int, chunk: int) -> None:
    assert heap_pages(2048, pages, toast) == chunk


def test_a_chunk_has_a_page_at_least() -> None:
    assert heap_pages(2048, 1, 2**30) == 1
