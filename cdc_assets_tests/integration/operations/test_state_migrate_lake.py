"""``state migrate`` of a source whose lake is in use: its catalog stays where it is."""

from __future__ import annotations

import json

import pytest
from psycopg.conninfo import conninfo_to_dict

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.errors import ConfigurationError
from cdc_assets.operations.state.migrate import at_another_place, migrate_state
from cdc_assets.readiness.surroundings import review
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.integration.operations.test_operations import SETUP, A
from cdc_assets_tests.support.lake import Lake, NewLake, used

pytestmark = pytest.mark.spark


def named_catalog(config: SourceConfig) -> SourceConfig:
    """As the error says it."""
    with pytest.raises(ConfigurationError, match="stays there, and has to be named") as caught:
        migrate_state(config, "postgresql://u@h/x")
    uri = next(word for word in caught.value.remedy.split() if word.startswith("postgresql://"))
    assert config.postgres.dsn is not None
    password = conninfo_to_dict(config.postgres.dsn.get_secret_value())["password"]
    assert str(password) not in str(caught.value)
    uri = uri.rstrip(";").replace("${CATALOG_PASSWORD}", str(password))
    data = json.loads(config.dump())
    data["lake"]["catalog"]["uri"] = uri
    return parse_config(data, "test", expanded=True)


def test_merges_and_care_go_on(copied_lake: NewLake, postgres_dsn: NewDatabase) -> None:
    other = postgres_dsn()
    with copied_lake(SETUP, "a") as source:
        source.execute("update a set v = 'y'; delete from a where id = 3")
        source.flush()
        source.drain(A)
        before = source.snapshots(A)
        here = named_catalog(source.config)
        source.pins.close()
        source.pipeline.close()
        migrate_state(here, other)
        there = Lake(at_another_place(here, other), source.source)
        try:
            there.execute("insert into a values (77, 'later')")
            there.catch_up()
            assert there.equal(A)
            assert there.snapshots(A) > before
            assert [one.equal for one in there.verify()] == [True]
            used(there, A)
            errors = [f.code for f in review(there.config) if f.severity == "error"]
            assert errors == []
            assert "state_moved" in {f.code for f in review(here)}
        finally:
            there.close()
