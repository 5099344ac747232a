"""Tables that couldn't be registered are looked at again; those that were given up are not."""

from __future__ import annotations

import pytest

from cdc_assets.log.states import TableState
from cdc_assets.operations.drop_table import drop_table
from cdc_assets.pins import pins
from cdc_assets.pipeline import Pipeline
from cdc_assets_tests.integration.pins.pinning import PLAIN, T, U, pinning
from cdc_assets_tests.support.flusher import Bench


def test_a_flusher_of_the_old_configuration_takes_up_no_dropped_table_by_itself(
    source: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told of the new one by and by, and would have published the table again by then."""
    monkeypatch.setattr(pins, "_REFUSED_SECONDS", 0.0)
    with pinning(source, f"{PLAIN}; create table u (id int primary key)", "t", "u") as here:
        here.pins.tick()
        left = tuple(table for table in here.config.tables if table.id != U)
        with Pipeline.open(here.config.model_copy(update={"tables": left})) as fewer:
            drop_table(fewer, U)
        for _ in range(3):
            here.pins.tick()
        assert here.state(U)[0] == TableState.PARKED
        published = source.execute("select tablename from pg_publication_tables")
        assert published == [(T.name,)]
