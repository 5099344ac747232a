"""What an OpenLineage backend is told: one run for a copy, one for the merges between two looks."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.errors import ConfigurationError
from cdc_assets.observe.openlineage.datasets import place_of, server_of
from cdc_assets.observe.openlineage.steps import Told, steps
from cdc_assets.observe.openlineage.teller import client_of
from cdc_assets.observe.status import TableStatus

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
NOW = NOON + timedelta(minutes=5)
STREAMS = TableStatus("public.t", "src.t", "streaming", epoch=3, applied_offset=20)
COPIES = replace(STREAMS, state="copying", applied_offset=0)
PARKED = replace(STREAMS, state="parked", reason="no key")
TOLD = Told(3, "streaming", copied=True, offset=20, at=NOON)
UNDER_WAY = Told(3, "copying", copied=False, offset=0, at=NOON)


@pytest.mark.parametrize(
    ("table", "before", "expected"),
    [
        (COPIES, None, ["copy START copy 3"]),
        (COPIES, UNDER_WAY, []),
        (STREAMS, UNDER_WAY, ["copy COMPLETE copy 3"]),
        # Nobody looked while it was copied; or events are new here.
        (STREAMS, None, ["copy START copy 3", "copy COMPLETE copy 3"]),
        (replace(STREAMS, state="copied"), UNDER_WAY, ["copy COMPLETE copy 3"]),
        (replace(STREAMS, state="waiting"), None, []),
        (STREAMS, TOLD, []),
        (
            STREAMS,
            replace(TOLD, offset=15),
            ["merge START merge 3 15", "merge COMPLETE merge 3 15"],
        ),
        # Copied anew: the copy that was under way is none any more.
        (replace(COPIES, epoch=4), UNDER_WAY, ["copy ABORT copy 3", "copy START copy 4"]),
        (replace(COPIES, epoch=4), TOLD, ["copy START copy 4"]),
        (PARKED, UNDER_WAY, ["copy FAIL copy 3"]),
        (COPIES, replace(UNDER_WAY, state="parked"), ["copy START copy 3"]),
        (PARKED, replace(TOLD, state="parked"), []),
        (STREAMS, replace(TOLD, state="parked"), []),
        (
            STREAMS,
            replace(TOLD, state="parked", offset=15),
            ["merge START merge 3 15", "merge COMPLETE merge 3 15"],
        ),
    ],
)
def test_what_happened_since_a_look_is_told_once(
    table: TableStatus, before: Told | None, expected: list[str]
) -> None:
    assert [f"{s.work} {s.type} {s.run}" for s in steps(table, before, NOW)] == expected


def test_what_was_merged_until_a_table_was_parked_is_told_beside_the_reason() -> None:
    found = [*steps(PARKED, replace(TOLD, offset=15), NOW)]
    assert [(s.work, s.type, s.reason) for s in found] == [
        ("merge", "START", None),
        ("merge", "COMPLETE", None),
        ("merge", "START", None),
        ("merge", "FAIL", "no key"),
    ]
    assert found[0].run == found[1].run != found[2].run == found[3].run


def test_a_run_lasts_from_the_look_before_and_has_the_changes_of_its_offsets() -> None:
    start, complete = steps(STREAMS, replace(TOLD, offset=15), NOW)
    assert (start.at, complete.at) == (NOON, NOW)
    assert (start.rows, complete.rows) == (None, 5)
    assert [s.at for s in steps(STREAMS, None, NOW)] == [NOW, NOW]


def test_what_was_told_is_read_as_it_was_written() -> None:
    for told in (TOLD, UNDER_WAY):
        assert Told.parse(str(told)) == told


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("file:///lake/src/t", ("file", "/lake/src/t")),
        ("s3://bucket/lake/src/t/", ("s3://bucket", "lake/src/t")),
        ("s3a://bucket/lake/src/t", ("s3://bucket", "lake/src/t")),
        ("gs://bucket/t", ("gs://bucket", "t")),
        ("hdfs://name:8020/lake/t", ("hdfs://name:8020", "lake/t")),
    ],
)
def test_a_lake_table_has_the_name_that_spark_gives_it(uri: str, expected: tuple[str, str]) -> None:
    assert place_of(uri) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ("localhost", "5432")),
        ({"host": "db.example.com", "hostaddr": "10.0.0.5"}, ("db.example.com", "5432")),
        ({"host": "a,b", "port": "6432,6433"}, ("a", "6432")),
        ({"hostaddr": "10.0.0.5"}, ("10.0.0.5", "5432")),
        ({"host": "/var/run/postgresql"}, ("localhost", "5432")),
        ({"host": "::1"}, ("[::1]", "5432")),
    ],
)
def test_a_source_has_the_name_that_others_give_its_server(
    given: dict[str, str], expected: tuple[str, str]
) -> None:
    assert server_of(given) == expected


def configured(**openlineage: str) -> SourceConfig:
    source = {"name": "s", "postgres": {"dsn": "postgresql://h/d"}, "tables": [{"name": "t"}]}
    return parse_config(source | {"openlineage": openlineage}, "test")


@pytest.mark.parametrize("url", ["https://h:port/s3cret", "https://[::1/s3cret", "https:///s3cret"])
def test_an_address_that_is_none_is_not_shown(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"openlineage\.url") as problem:
        client_of(configured(url=url))
    assert "s3cret" not in str(problem.value)


def test_a_key_that_no_header_can_have_is_refused_at_once() -> None:
    with pytest.raises(ConfigurationError, match="api_key") as problem:
        configured(url="https://h", api_key="s3cret\n")
    assert "s3cret" not in str(problem.value)
