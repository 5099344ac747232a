"""A merge waits for its target, and no longer."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

import cdc_assets
from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.log.batch import BATCH_ROWS
from cdc_assets.log.cursors import Backlog
from cdc_assets.materializer.workers.cadence import Cadence
from cdc_assets.postgres.names import TableId

T = TableId("public", "t")
NOW = datetime(2026, 1, 1, tzinfo=UTC)
_DOCS = Path(cdc_assets.__file__).parents[1] / "docs"


OTHERS = [TableId("public", f"t{number}") for number in range(5)]


def config(target: str) -> SourceConfig:
    names = ["public.t", *map(str, OTHERS)]
    tables = [{"name": name, "freshness": {"target": target}} for name in names]
    dsn = "postgresql://u@h/d"
    return parse_config({"name": "s", "postgres": {"dsn": dsn}, "tables": tables}, "test")


def backlog(seconds: float, **more: Any) -> Backlog:
    """One change of that age."""
    values = {"rows": 1, "bytes": 100, "offset": 0, **more}
    return Backlog(table=T, oldest_commit=NOW - timedelta(seconds=seconds), **values)


def test_a_merge_begins_so_that_the_oldest_change_is_visible_at_the_target() -> None:
    cadence = Cadence(config("10s"))
    cadence.took(T, 4.0)
    # A file's commit is its last one's; the first may be a flush interval, 1 s, older.
    assert cadence.due_seconds(backlog(4.5), NOW) == pytest.approx(0.5)
    cadence.took(T, 30.0)
    cadence.took(T, 30.0)  # longer than the target: one follows the other
    assert cadence.due_seconds(backlog(0.0), NOW) < 0


def test_the_longest_of_the_last_merges_is_expected_again_unless_it_was_an_odd_one() -> None:
    cadence = Cadence(config("10s"))
    for seconds in (4.0, 3.0, 2.5):
        cadence.took(T, seconds)
    assert cadence.due_seconds(backlog(4.5), NOW) == pytest.approx(0.5)
    for _ in range(12):
        cadence.took(T, 2.5)
    assert cadence.due_seconds(backlog(4.5), NOW) == pytest.approx(2.0)
    cadence.took(T, 60.0)
    assert cadence.due_seconds(backlog(3.5), NOW) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("hands", "begins"),
    [(1, [0.5, 1.5, 2.5, 3.5, 4.5]), (2, [2.5, 3.5, 3.5, 4.5, 4.5]), (5, [4.5] * 5)],
)
def test_tables_that_are_due_together_begin_one_after_the_other(
    hands: int, begins: list[float]
) -> None:
    cadence = Cadence(config("10s"))
    waiting = [replace(backlog(3.5), table=table) for table in OTHERS]
    for table in OTHERS:
        cadence.took(table, 1.0)
    found = cadence.begin_seconds(waiting, NOW, hands)
    assert [found[table] for table in OTHERS] == pytest.approx(begins)


def test_a_table_that_nobody_waits_for_begins_when_it_is_due() -> None:
    cadence = Cadence(config("10s"))
    ages = [8.0, 5.0, 2.0]
    waiting = [replace(backlog(age), table=table) for table, age in zip(OTHERS, ages, strict=False)]
    for table in OTHERS:
        cadence.took(table, 1.0)
    found = cadence.begin_seconds(waiting, NOW, 1)
    assert list(map(found.__getitem__, OTHERS[:3])) == pytest.approx([0.0, 3.0, 6.0])
    # Five minutes behind: it takes nothing from the one that isn't.
    late = replace(backlog(300.0), table=T)
    found = cadence.begin_seconds([late, waiting[2]], NOW, 1)
    assert found == pytest.approx({T: -292.0, OTHERS[2]: 6.0})


def test_a_table_of_the_guide_is_merged_every_15_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change each 10 s, seen by a clock of ours, for two hours."""
    guide = (_DOCS / "operate/tables.md").read_text(encoding="utf-8")
    section = guide.split("## How often a table is merged", 1)[1].split("\n## ", 1)[0]
    example = section.split("```yaml\n", 1)[1].split("```", 1)[0]
    source = {"name": "s", "postgres": {"dsn": "postgresql://u@h/d"}, **yaml.safe_load(example)}
    read = parse_config(source, "test")
    [table] = [configured.id for configured in read.tables]
    cadence, clock, merges, oldest = Cadence(read), 0.0, list[float](), 0.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    while clock < 7200:
        waiting = replace(backlog(0), table=table, offset=int(oldest))
        waiting = replace(waiting, oldest_commit=NOW + timedelta(seconds=oldest))
        begins = cadence.begin_seconds([waiting], NOW + timedelta(seconds=clock), 4)
        if begins[table] <= 0:
            cadence.took(table, 3.0)
            merges.append(clock)
            oldest = clock // 10 * 10 + 10  # the first one that comes after the merge
        clock += 1
    gaps = [after - before for before, after in itertools.pairwise(merges)]
    assert len(merges) == 8
    assert all(14.75 * 60 < gap <= 15.25 * 60 for gap in gaps), gaps


@pytest.mark.parametrize("full", [{"bytes": 10**9}, {"rows": BATCH_ROWS}])
def test_a_full_batch_is_due_at_once(full: dict[str, int]) -> None:
    assert Cadence(config("4m")).due_seconds(backlog(0.0, **full), NOW) <= 0


def test_a_target_of_nothing_waits_for_nothing() -> None:
    assert Cadence(config("0s")).due_seconds(backlog(0.0), NOW) <= 0


def test_a_clock_that_is_ahead_delays_no_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    cadence, ahead = Cadence(config("10s")), backlog(-3600.0)
    began = time.monotonic()
    assert cadence.due_seconds(ahead, NOW) > 0
    monkeypatch.setattr(time, "monotonic", lambda: began + 9.5)
    assert cadence.due_seconds(ahead, NOW) < 0
    assert cadence.due_seconds(backlog(-3600.0, offset=7), NOW) > 0  # applied: another one waits


def test_in_quiet_times_no_merge_is_due_and_then_all_are() -> None:
    freshness = {"quiet": ["22:00-06:00"], "warn": "9h", "fail": "10h"}
    table = {"name": "public.t", "freshness": freshness}
    data = {"name": "s", "postgres": {"dsn": "postgresql://u@h/d"}, "tables": [table]}
    cadence = Cadence(parse_config(data, "test"))
    full = backlog(60.0, rows=BATCH_ROWS)  # NOW is midnight
    assert cadence.due_seconds(full, NOW) == cadence.due_seconds(backlog(60.0), NOW) == 6 * 3600
    cadence.took(T, 60.0)
    assert cadence.begin_seconds([backlog(60.0)], NOW, 1) == {T: 6 * 3600}, "none before its end"
    later = NOW + timedelta(hours=6)
    assert cadence.due_seconds(full, later) == 0
    assert cadence.due_seconds(backlog(60.0), later) < 0
