"""``check`` says what keeps rows of ``markers.table`` from becoming marks, and what helps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.messages.findings import Finding
from cdc_assets.pins.markers import publish_markers
from cdc_assets.readiness.asked.markers import marker_findings
from cdc_assets.readiness.source.left import of_patterns, replicable
from cdc_assets_tests.support.flusher import Bench, bench

NAME = "markers_src"


@pytest.fixture
def source(postgres: EmbeddedPostgres, tmp_path: Path) -> Iterator[Bench]:
    with bench(postgres.start(), NAME, tmp_path) as made:
        made.execute(f"create table t (id int primary key); create publication cdc_{NAME}")
        yield made


def configured(source: Bench) -> SourceConfig:
    tables = {"tables": ["t"], "markers": {"table": "cdc_markers"}}
    return parse_config({**source.settings(), **tables}, "test")


def found(source: Bench, role: str | None = None) -> Finding | None:
    with psycopg.connect(source.dsn, autocommit=True) as connection:
        if role is not None:
            connection.execute(f"set role {role}".encode())
        return next(marker_findings(connection, configured(source)), None)


def test_what_a_table_of_markers_lacks_is_told_until_nothing_does(source: Bench) -> None:
    missing = found(source)
    assert missing is not None
    assert (missing.code, missing.severity) == ("markers_missing", "warning")
    for odd in ("create view cdc_markers as select 1 as marker, '' as name",
                "create unlogged table cdc_markers (marker uuid, name text)",
                "create table cdc_markers (marker uuid, title text)"):  # fmt: skip
        source.execute(odd)
        told = found(source)
        assert told is not None
        assert (told.code, told.severity) == ("markers_columns", "warning")
        source.execute(f"drop {'view' if ' view ' in odd else 'table'} cdc_markers")

    source.execute(missing.remedy)
    lacks = found(source)
    assert lacks is not None
    assert (lacks.code, lacks.severity) == ("markers_unpublished", "info")
    source.execute("create role stranger")
    denied = found(source, "stranger")
    assert denied is not None
    assert (denied.code, denied.severity) == ("markers_unpublished", "warning")
    source.execute("drop role stranger")

    with psycopg.connect(source.dsn, autocommit=True) as connection:
        publish_markers(connection, configured(source))
        assert found(source) is None
        source.execute(f"alter publication cdc_{NAME} set (publish = 'update, delete')")
        withheld = found(source)
        assert withheld is not None
        assert withheld.code == "markers_unpublished"


def test_no_pattern_stands_for_the_table(source: Bench) -> None:
    source.execute("create table cdc_markers (marker uuid primary key, name text)")
    patterns = {"tables": ["public.*"], "markers": {"table": "cdc_markers"}}
    config = parse_config({**source.settings(), **patterns}, "test")
    with psycopg.connect(source.dsn, autocommit=True) as connection:
        there = replicable(connection, config)
        assert config.markers.id in there
        assert config.markers.id not in of_patterns(config, there)
