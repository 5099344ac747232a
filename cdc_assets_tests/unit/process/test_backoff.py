"""The back-off's arithmetic, apart from any process."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cdc_assets.process.backoff import Backoff


def test_it_doubles_up_to_the_cap() -> None:
    backoff = Backoff(first_seconds=1.0, cap_seconds=10.0)
    assert [backoff.delay_seconds(n) for n in range(7)] == [0.0, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_a_healthy_life_forgives_what_was_before() -> None:
    backoff = Backoff(healthy_seconds=60.0)
    assert backoff.failures(7, lived_seconds=59.9) == 8
    assert backoff.failures(7, lived_seconds=60.0) == 1


@given(st.integers(0, 10**9), st.floats(0.001, 100), st.floats(0.001, 10_000))
def test_it_never_falls_and_never_passes_the_cap(failures: int, first: float, cap: float) -> None:
    backoff = Backoff(first_seconds=first, cap_seconds=cap)
    now, later = backoff.delay_seconds(failures), backoff.delay_seconds(failures + 1)
    assert 0.0 <= now <= later <= cap
