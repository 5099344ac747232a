"""Signals ask for backfills and steer them: rows of the coordination schema, or of the source."""

from __future__ import annotations

import json
from typing import Any

import pytest
from psycopg import sql

from cdc_assets.log import backfills as record
from cdc_assets.operations.signals import bring_signals, take_signals
from cdc_assets.postgres.session.connect import connect
from cdc_assets.readiness.asked import signals
from cdc_assets.readiness.asked.signals import MOST, signal_findings
from cdc_assets_tests.support.backfills import carried_out, damage
from cdc_assets_tests.support.lake import Lake

pytestmark = pytest.mark.spark


def signalled(source: Lake, kind: str, data: Any, key: str = "one") -> str:
    source.pipeline.store.connection.execute(
        "insert into signals (source, id, kind, data) values (%s, %s, %s, %s)",
        (source.config.name, key, kind, json.dumps(data)),
    )
    assert take_signals(source.pipeline) == 1
    assert take_signals(source.pipeline) == 0
    row = source.pipeline.store.connection.execute(
        "select outcome from signals where id = %s and done_at is not null", (key,)
    ).fetchone()
    assert row is not None
    return str(row[0])


def test_a_signal_asks_for_a_backfill_of_some_rows_and_others_steer_it(source: Lake) -> None:
    damage(source, "update lake.src.t set v = 'wrong' where id in (3, 200)")
    data = {
        "data-collections": ["public.t"],
        "additional-conditions": [{"data-collection": "public.t", "filter": "id < 100"}],
    }
    assert signalled(source, "execute-snapshot", data) == "backfill 1 of public.t"
    assert signalled(source, "pause-snapshot", {}, "two") == "backfill 1 is paused"
    assert record.backfills(source.pipeline.store, outstanding=True) == []
    resumed = {"data-collections": ["public.t"]}
    assert signalled(source, "resume-snapshot", resumed, "three") == "backfill 1 is requested"
    [one] = record.backfills(source.pipeline.store, outstanding=True)
    assert (one.predicate, one.requested_by) == ("id < 100", "signal one")
    assert carried_out(source, one.number).applied == 99
    assert signalled(source, "stop-snapshot", {}, "four") == "there was none to stop"
    assert signalled(source, "log", {"message": "hello"}, "five") == "logged"


@pytest.mark.parametrize(
    ("kind", "data", "said"),
    [
        ("explode", {}, "explode is no kind of signal"),
        ("execute-snapshot", {}, "data-collections names no table"),
        ("execute-snapshot", {"data-collections": ["public.no"]}, "public.no"),
        ("execute-snapshot", {"data-collections": "public.t"}, "data-collections isn't a list"),
        ("execute-snapshot", {"data-collections": ["public.t"], "type": "blocking"}, "blocking"),
        (
            "execute-snapshot",
            {"data-collections": ["public.t"], "additional-conditions": [{"filter": "1 = 1"}]},
            "an element of additional-conditions isn't an object with",
        ),
        (
            "execute-snapshot",
            {
                "data-collections": ["public.t"],
                "additional-conditions": [{"data-collection": "public.t", "filter": "no = 1"}],
            },
            "Postgres refuses where",
        ),
        ("pause-snapshot", {"backfill": 4711}, "has no backfill 4711"),
        ("pause-snapshot", [], "its data isn't a JSON object"),
        ("pause-snapshot", {"backfill": None}, "backfill isn't the number of one"),
        ("pause-snapshot", {"backfill": [1]}, "backfill isn't the number of one"),
        ("pause-snapshot", {"backfill": 2**70}, "backfill isn't the number of one"),
        (
            "execute-snapshot",
            {"data-collections": ["public.t"], "replace": "false"},
            "replace is neither true nor false",
        ),
    ],
)
def test_a_signal_that_cannot_be_done_says_so(
    source: Lake, kind: str, data: Any, said: str
) -> None:
    outcome = signalled(source, kind, data)
    assert outcome.startswith("refused: ") and said in outcome
    assert record.backfills(source.pipeline.store) == []


# --- a table of the source ---

TABLE = "create table signalling (id varchar(42) primary key, type varchar(32), data varchar(2048))"
EXECUTE = '{"data-collections": ["public.t"], "type": "incremental"}'


def with_table(source: Lake) -> None:
    """As after another start with ``backfills.signals``."""
    changed = source.config.backfills.model_copy(update={"signals": "public.signalling"})
    source.pipeline.config = source.config.model_copy(update={"backfills": changed})


def outcomes(source: Lake) -> dict[str, str]:
    rows = source.pipeline.store.connection.execute("select id, outcome from signals")
    return {key: str(outcome) for key, outcome in rows.fetchall()}


def taken(source: Lake) -> int:
    assert bring_signals(source.pipeline) is None
    return take_signals(source.pipeline)


def test_rows_of_a_table_of_the_source_are_signals_each_once(source: Lake) -> None:
    with_table(source)
    source.execute(TABLE)
    assert taken(source) == 0
    source.execute(f"insert into signalling values ('z', 'execute-snapshot', '{EXECUTE}')")
    source.execute("insert into signalling values ('a', 'pause-snapshot', null)")
    assert (taken(source), taken(source)) == (2, 0)
    assert outcomes(source) == {"z": "backfill 1 of public.t", "a": "backfill 1 is paused"}
    # It is done once for as long as its row is there, however long that is.
    old = "update signals set done_at = done_at - interval '1 year'"
    source.pipeline.store.connection.execute(old.encode())
    source.execute("delete from signalling where id = 'a'")
    source.execute("insert into signalling values ('b', 'log', '{}')")
    assert (taken(source), taken(source)) == (1, 0)
    assert outcomes(source).keys() == {"z", "b"}
    assert len(record.backfills(source.pipeline.store)) == 1


def test_what_is_no_signal_is_refused_and_holds_up_no_other(source: Lake) -> None:
    with_table(source)
    source.execute(TABLE)
    source.execute("alter table signalling alter data type text")
    for key, kind, data in (
        ("a", "execute-snapshot", "{"),
        ("b", "execute-snapshot", '{"data-collections": ["\\u0000"]}'),
        ("c", "execute-snapshot", "[" * 20_000),
        ("d", "", "{}"),
        ("window", "snapshot-window-open", "{}"),
        ("e", "log", '{"message": "hello"}'),
    ):
        source.execute(f"insert into signalling values ('{key}', '{kind}', '{data}')")
    source.execute("insert into signalling values ('f')")
    assert taken(source) == 6
    found = outcomes(source)
    assert found.pop("f") == found["d"]
    assert found.pop("e") == "logged"
    assert found.pop("d").startswith('refused: "" is no kind of signal')
    assert len(found) == 3
    assert all("its data isn't a JSON object" in said for said in found.values())


@pytest.mark.parametrize(
    "row",
    [
        "(select string_agg(md5(i::text), '') from generate_series(1, 300) i), 'log', '{}'",
        "'deep' || i, 'log', repeat('[', i) || repeat(']', i) from generate_series(850, 1000, 3) i",
        "'a', repeat('x', 10000), '{}'",
    ],
)
def test_no_row_of_the_source_keeps_others_from_being_done(source: Lake, row: str) -> None:
    with_table(source)
    source.execute("create table signalling (id text, type text, data text)")
    source.execute(f"insert into signalling select {row}")
    source.execute("insert into signalling values ('z', 'log', '{}')")
    assert taken(source) >= 2
    assert taken(source) == 0
    assert outcomes(source)["z"] == "logged"


@pytest.mark.parametrize(
    "data", ["repeat('[', 2000) || repeat(']', 2000)", "'{\"a\": ' || repeat('1', 5000) || '}'"]
)
def test_no_row_of_the_schema_keeps_others_from_being_done(source: Lake, data: str) -> None:
    statement = f"insert into signals select 'src', 'a', 'log', ({data})::jsonb"
    source.pipeline.store.connection.execute(statement.encode())
    statement = "insert into signals (source, id, kind) values ('src', 'z', 'log')"
    source.pipeline.store.connection.execute(statement.encode())
    assert take_signals(source.pipeline) == 2
    found = outcomes(source)
    assert found["z"] == "logged" and "its data isn't a JSON object" in found["a"]


def test_a_table_that_takes_long_to_read_is_told(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_table(source)
    source.execute(TABLE)
    source.execute(
        "insert into signalling select i, 'snapshot-window-open' from generate_series(1, 50000) i"
    )
    assert taken(source) == 0
    limit = signals._LIMIT.as_string(None).replace(f"{signals._SECONDS}s", "1ms")
    monkeypatch.setattr(signals, "_LIMIT", sql.SQL(limit).format())
    assert "takes more than 5 s to read" in str(bring_signals(source.pipeline))


@pytest.mark.parametrize(
    ("setup", "said"),
    [
        ("", "the source has no table public.signalling"),
        ("create view signalling as select 1 as id", "the source has no table public.signalling"),
        ("create table signalling (id text, data text)", "public.signalling has no column type"),
        (
            f"{TABLE}; insert into signalling select i, 'log' from generate_series(0, {MOST}) i",
            "has more than 1,000 rows",
        ),
    ],
)
def test_a_table_that_cannot_be_read_is_told_and_harms_nothing(
    source: Lake, setup: str, said: str
) -> None:
    with_table(source)
    if setup:
        source.execute(setup)
    assert said in str(bring_signals(source.pipeline))
    with connect(source.pipeline.source_dsn) as session:
        [finding] = signal_findings(session, source.pipeline.config)
    assert (finding.code, finding.severity) == ("signals_unreadable", "warning")
    assert said in finding.message
    assert take_signals(source.pipeline) == 0
