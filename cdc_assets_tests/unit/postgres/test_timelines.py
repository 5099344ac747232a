"""Where the histories of two servers part."""

from __future__ import annotations

import pytest

from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.timelines import History, _parsed, parted

A, B, C = Lsn(100), Lsn(200), Lsn(300)
FIRST = History(1)


@pytest.mark.parametrize(
    ("source", "copy", "point"),
    [
        (FIRST, FIRST, None),  # the source itself, or its standby
        (FIRST, History(2, ((1, A),)), A),
        (History(2, ((1, A),)), History(3, ((1, A), (2, B))), B),
        (History(2, ((1, B),)), FIRST, B),  # a standby that hasn't followed a failover
        # Made before a failover, and promoted by itself: both call their timeline 2.
        (History(2, ((1, B),)), History(2, ((1, A),)), A),
        (History(2, ((1, A),)), History(2, ((1, B),)), A),
        (History(2, ((1, B),)), History(3, ((1, A), (2, C))), A),
        (History(2, ((1, A),)), History(3, ((1, A),)), A),
        (History(5), History(4), Lsn.ZERO),
    ],
)
def test_servers_have_the_same_wal_until_one_leaves_the_timeline(
    source: History, copy: History, point: Lsn | None
) -> None:
    assert parted(source, copy) == point
    assert parted(copy, source) == point


def test_a_history_is_written_down() -> None:
    for history in (FIRST, History(5, ((1, A), (3, B)))):
        assert History.parse(str(history)) == history


def test_a_history_file_is_read() -> None:
    said = b"1\t0/64\tno recovery target specified\n\n2\t0/C8\tbefore 2026-01-01\n"
    assert _parsed(said) == ((1, A), (2, B))
