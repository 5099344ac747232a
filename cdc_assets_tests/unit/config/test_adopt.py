"""What ``adopt`` of a table takes."""

from __future__ import annotations

from typing import Any

import pytest

from cdc_assets.config.snapshot import AdoptConfig
from cdc_assets.config.source import SourceConfig, config_from_parent, parse_config
from cdc_assets.errors import ConfigurationError
from cdc_assets.log.states import TableState
from cdc_assets.log.table_row import TableRow
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.readiness.strategy import adopts


def parsed(adopt: object, **more: Any) -> SourceConfig:
    tables = [{"name": "t", "adopt": adopt}]
    given = {"name": "src", "postgres": {"dsn": "postgresql://h/d"}, "tables": tables}
    return parse_config({**given, **more}, "test")


@pytest.mark.parametrize(
    ("adopt", "taken"),
    [
        (True, AdoptConfig()),
        (False, None),
        (None, None),
        ({"lsn": "0/1A2B3C8"}, AdoptConfig(lsn="0/1A2B3C8")),
        ({"mark": "end"}, AdoptConfig(mark="end")),
        ({"wait": True}, AdoptConfig(wait=True)),
    ],
)
def test_its_forms(adopt: object, taken: AdoptConfig | None) -> None:
    config = parsed(adopt)
    assert config.tables[0].adopt == taken
    assert config_from_parent(config.dump()) == config  # as the flusher has it


@pytest.mark.parametrize(
    ("adopt", "more", "told"),
    [
        ({"lsn": "0/1", "wait": True}, {}, "give one of lsn, mark and wait"),
        ({"lsn": "now"}, {}, "lsn"),
        (True, {"snapshot": {"mode": "snapshot_only"}}, "adopt: goes with a log"),
        (
            True,
            {"snapshot": {"from": {"kind": "clone", "dsn": "postgresql://h/d"}}},
            "doesn't go with snapshot.from",
        ),
    ],
)
def test_what_it_does_not_go_with(adopt: object, more: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        parsed(adopt, **more)


@pytest.mark.parametrize(
    ("epoch", "snapshot_lsn", "adopted"), [(1, None, True), (2, None, False), (1, Lsn(7), False)]
)
def test_nothing_is_adopted_but_a_table_that_begins(
    epoch: int, snapshot_lsn: Lsn | None, adopted: bool
) -> None:
    """A copy that was begun, and has lost its pin, goes on."""
    state, table = TableState.WAITING, TableId("public", "t")
    row = TableRow(table, 1, epoch, state, ("id",), (), snapshot_lsn, None, None, None)
    assert adopts(parsed(True), row) is adopted
