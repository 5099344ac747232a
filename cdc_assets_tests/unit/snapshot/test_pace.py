"""How many pages a short transaction reads, over chunks that cut its parts short."""

from __future__ import annotations

from cdc_assets.postgres.ctid import CtidRange
from cdc_assets.snapshot.pace import Pace

CHUNK = 2048


def longest(chunks: int, slow_from: int) -> list[float]:
    """How long the parts of the slow chunks take: a page 30 ms; all others have chunks of 0.1 s."""
    pace, took = Pace(2.0), list[float]()
    for number in range(chunks):
        chunk = CtidRange(number * CHUNK, (number + 1) * CHUNK)
        for part in pace.parts(chunk, chunks * CHUNK):
            assert part.end_block is not None
            pages = part.end_block - part.first_block
            seconds = pages * (0.030 if number >= slow_from else 0.1 / CHUNK)
            if number >= slow_from:
                took.append(seconds)
            pace.took(seconds, pages)
    return took


def test_a_part_that_its_chunk_cuts_short_tells_how_long_a_page_takes() -> None:
    took = longest(310, 300)
    assert sum(seconds > 10.0 for seconds in took) == 1  # the first, of which nothing was known


def test_any_number_of_quick_chunks_is_read() -> None:
    longest(3000, 3000)


def test_halves_of_a_part_are_not_taken_for_parts() -> None:
    pace = Pace(2.0)
    (first, *_) = pace.parts(CtidRange(0, 10_000), 10_000)
    assert first == CtidRange(0, 256)
    for _ in range(8):
        pace.took(2.0, 32)  # each took as long as a part may
    (first, *_) = pace.parts(CtidRange(0, 10_000), 10_000)
    assert first == CtidRange(0, 32)
