"""Two lakes of one source, at a mark that both made of one row: what differs is named."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from cdc_assets.errors import ConfigurationError
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.log.asked import marks as log
from cdc_assets.marks.diff import rows as diff_rows
from cdc_assets.marks.diff.compare import Difference
from cdc_assets.marks.diff.whole import Diff, diff
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.support.lake import Lake, copied

pytestmark = pytest.mark.spark

MARKERS = {"table": "public.cdc_markers"}
SETUP = """
create table cdc_markers (marker uuid primary key default gen_random_uuid(), name text);
create table a (id int, b text, n numeric(8, 2), f float8, at timestamptz, tags text[],
  primary key (id, b));
insert into a select i, 'k' || i, i * 1.5, i / 3.0, now(), array['x', null, i::text]
  from generate_series(1, 200) i;
create table loose (x int, y text);
insert into loose select i % 5, 'same' from generate_series(1, 50) i;
create table kept (id int primary key, v text);
insert into kept select i, 'v' || i from generate_series(1, 20) i;
"""


class Pair:
    """Blue and green over one database; ``tables`` and settings of each."""

    def __init__(self, blue: Lake, green: Lake) -> None:
        self.blue, self.green = blue, green

    def execute(self, statement: str) -> None:
        self.blue.execute(statement)

    def mark(self, name: str = "m") -> None:
        """A mark, and changes behind it that both have merged."""
        self.execute(f"insert into cdc_markers (name) values ('{name}')")
        self.execute("update a set n = n + 1; delete from kept where id = 20")
        self.catch_up()

    def tampered(self, name: str, *statements: str) -> None:
        """A mark of the same rows, but for what ``statements`` do to green's first table."""
        self.execute(f"insert into cdc_markers (name) values ('{name}')")
        self.catch_up()
        lake = self.green.lake_table(self.green.tables[0]).sql_name
        for statement in (*statements, f"alter table {{}} create or replace tag `mark_{name}`"):
            self.green.session.sql(statement.format(lake))

    def catch_up(self) -> None:
        for side in (self.blue, self.green):
            side.catch_up()

    def diff(self, name: str = "m", *tables: str, **more: Any) -> Diff:
        return diff(self.blue.config, self.green.config, name, tables, **more)

    def one(self, name: str, table: str, **more: Any) -> Difference:
        [found] = self.diff(name, table, **more).tables
        return found


NewPair = Callable[..., Pair]


@pytest.fixture
def pair(postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path) -> Iterator[NewPair]:
    with ExitStack() as stack:

        def made(
            blue: Sequence[Any],
            green: Sequence[Any] | None = None,
            salts: tuple[str | None, str | None] = (None, None),
            **settings: Any,
        ) -> Pair:
            dsn, url = postgres_dsn(), spark_server.ensure()
            first = copied(dsn, url, SETUP, *blue, markers=MARKERS, mask_salt=salts[0])
            more = {"name": "green", "state": {"schema": "_green"}, "markers": MARKERS}
            tables = blue if green is None else green
            settings = {**more, "mask_salt": salts[1], **settings}
            second = copied(dsn, url, "", *tables, **settings)
            return Pair(stack.enter_context(first), stack.enter_context(second))

        yield made


def test_lakes_of_other_settings_are_equal_and_one_row_that_is_not_is_named(pair: NewPair) -> None:
    green = [
        {"name": "a", "partition_by": ["bucket(4, id)"], "columns": {"types": {"n": "string"}}},
        {"name": "loose", "mode": "append"},
        {"name": "kept", "mode": "soft_delete"},
    ]
    blue = ["a", {"name": "loose", "mode": "append"}, "kept"]
    both = pair(blue, green, lake={"format_version": 2}, snapshot={"strategy": "incremental"})
    both.execute("update a set n = null, f = 'NaN' where id = 3; delete from kept where id < 5")
    both.execute("update a set b = 'moved' where id = 7; insert into loose values (1, 'same')")
    both.mark()
    found = both.diff()
    assert [(str(t.table), t.outcome) for t in found.tables] == [
        ("public.a", "equal"),
        ("public.kept", "equal"),
        ("public.loose", "equal"),
    ]
    assert found.exit_code == 0
    assert [t.rows and (t.rows.blue, t.rows.green) for t in found.tables] == [
        (200, 200),
        (16, 16),
        (51, 51),
    ]
    assert found.tables[0].remarks == (
        "n is decimal(8,2) in blue and string in green: compared as text",
    )
    assert found.tables[1].remarks[0] == "mode is mirror in blue and soft_delete in green"

    both.tampered(
        "odd",
        "update {} set f = 7, b = 'odd' where id = 9",
        "update {} set f = 7 where id = 10",
    )
    done = both.one("odd", "a")
    assert done.outcome == "different"
    assert done.rows is not None
    assert (done.rows.differing, done.rows.at_least, done.rows.columns) == (3, False, ("f",))
    told = " ".join(done.rows.keys)
    assert not any(value in told for value in ("odd", "k9", "k10"))
    assert done.rows.keys[0].startswith("#")
    shown = both.one("odd", "a", show_keys=True)
    assert shown.rows is not None
    ends = [key.split(" ", 1)[1] for key in shown.rows.keys]
    assert ends == [
        '{"id":"10","b":"k10"} (blue 1, green 1: f)',
        '{"id":"9","b":"k9"} (blue 1, green 0)',
        '{"id":"9","b":"odd"} (blue 0, green 1)',
    ]
    assert both.diff("odd").exit_code == 1
    assert both.diff("m").exit_code == 0


def test_rows_of_a_table_without_a_key_are_counted(
    pair: NewPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diff_rows, "_SHOWN_ROWS", 5)  # equal ones are one
    both = pair([{"name": "loose", "mode": "append"}])
    both.tampered("odd", "insert into {0} select * from {0} where x = 2 limit 1")
    found = both.one("odd", "loose", show_keys=True)
    assert found.rows is not None
    assert (found.rows.blue, found.rows.green, found.rows.differing) == (50, 51, 1)
    assert found.rows.keys[0].endswith('{"x":"2","y":"same"} (blue 10, green 11)')


def test_columns_that_differ_are_told_and_the_others_compared(pair: NewPair) -> None:
    blue = [
        {"name": "a", "columns": {"mask": {"f": "redact", "n": "sha256"}}},
        {"name": "kept", "columns": {"mask": {"v": "redact"}}},
        {"name": "loose", "mode": "append"},
    ]
    green = [
        {"name": "a", "columns": {"mask": {"n": "sha256"}, "exclude": ["tags"],
                                  "rename": {"at": "seen"}}},
        {"name": "kept", "columns": {"mask": {"v": "redact"}}},
    ]  # fmt: skip
    salts = ("of blue, and long enough", "of green, and long enough")
    both = pair(blue, green, salts=salts)
    both.mark()
    found = {str(t.table): t for t in both.diff().tables}
    assert found["public.a"].schema == (
        "n is masked with another mask_salt: its values aren't compared",
        "f is masked otherwise (blue redact, green none): its values aren't compared",
        "at is called seen in green",
        "tags is in blue only (columns.exclude)",
    )
    rows = found["public.a"].rows
    assert rows is not None
    assert (rows.blue, rows.green, rows.differing) == (200, 200, 0)
    assert found["public.a"].outcome == "different"
    assert found["public.kept"].outcome == "equal"
    assert found["public.loose"].schema == ("the table is in blue only",)


def test_a_mark_that_is_missing_or_of_another_moment_is_told(pair: NewPair) -> None:
    both = pair(["a", "kept"])
    both.execute("insert into cdc_markers (name) values ('m')")
    both.blue.catch_up()
    with pytest.raises(ConfigurationError, match=r"green \(green\) has no mark m"):
        both.diff()
    both.green.flush()
    found = both.diff()
    assert found.exit_code == 2
    assert [t.outcome for t in found.tables] == ["no mark", "no mark"]
    assert "its merges haven't come to the mark yet" in (found.tables[0].problem or "")
    both.green.catch_up()
    assert both.diff().exit_code == 0
    for side in (both.blue, both.green):
        side.execute("update a set n = 0")
        side.flush()
        log.make(side.pipeline.store, "apart", side.tables)
    with pytest.raises(ConfigurationError, match="two moments"):
        both.diff("apart")
    with pytest.raises(ConfigurationError, match="one log"):
        diff(both.blue.config, both.blue.config, "m", [])


def test_where_nearly_all_differs_a_part_is_matched_and_that_is_said(
    pair: NewPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = pair(["a"])
    both.tampered("odd", "update {} set f = -1")
    whole = both.one("odd", "a").rows
    assert whole is not None
    assert (whole.differing, whole.at_least, len(whole.keys)) == (200, False, 20)
    monkeypatch.setattr(diff_rows, "MOST_ROWS", 50)
    part = both.one("odd", "a").rows
    assert part is not None
    assert part.at_least
    assert 20 <= part.differing <= 51


def test_no_log_is_brought_up_to_date(pair: NewPair) -> None:
    both = pair(["a"])
    both.mark()
    both.diff()  # makes the salt of names
    before = both.green.execute("select max(version) from _green.schema_version")
    both.green.execute("delete from _green.schema_version where version >= 35")
    both.green.execute("alter table _green.tables rename to tables_of_another_version")
    assert both.diff().exit_code == 0
    left = both.green.execute("select max(version) from _green.schema_version")
    assert left != before


_LATE = """
from cdc_assets.flusher.decode.markers import Markers
end_of = Markers.end_of
Markers.end_of = lambda self, batch: (end_of(self, batch), len(batch.scan.kind))[1]
"""


def test_were_a_flush_not_ended_at_the_commit_the_lakes_would_be_of_two_moments(
    pair: NewPair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    both = pair(["a"])
    both.execute("insert into cdc_markers (name) values ('m')")
    both.green.catch_up()
    both.execute("update a set n = n + 1 where id = 5")
    (tmp_path / "sitecustomize.py").write_text(_LATE)
    with monkeypatch.context() as patched:
        path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
        patched.setenv("PYTHONPATH", path)
        both.blue.catch_up()
    both.green.catch_up()
    with pytest.raises(ConfigurationError, match="two moments"):
        both.diff()
    with monkeypatch.context() as patched:
        patched.setattr("cdc_assets.marks.diff.sides.same_point", lambda blue, _: blue.mark.lsn)
        found = both.one("m", "a").rows
    assert found is not None
    assert (found.differing, found.columns) == (1, ("n",))
