"""Which columns are in the stream, by a column list or by how they are generated."""

from __future__ import annotations

import pytest

from cdc_assets.postgres.publication.contents import SentColumns

LISTED, WHOLE = 16400, 16401


@pytest.mark.parametrize(
    ("oid", "number", "generated", "is_sent"),
    [
        (WHOLE, 9, "", True),
        (WHOLE, 9, "s", True),
        (WHOLE, 9, "v", False),
        (LISTED, 2, "", True),
        (LISTED, 2, "v", True),  # Postgres decides what may be listed
        (LISTED, 3, "", False),
    ],
)
def test_a_column_list_decides_alone(oid: int, number: int, generated: str, is_sent: bool) -> None:
    sent = SentColumns(("", "s"), {LISTED: {1, 2}})
    assert sent.has(oid, number, generated) is is_sent


def test_a_list_without_a_column_sends_nothing() -> None:
    assert not SentColumns(("", "s"), {LISTED: ()}).has(LISTED, 1, "")
