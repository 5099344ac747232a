"""Rows by COPY from real servers: plaintext, TLS and libpq's own reading give the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from decimal import Decimal
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from cdc_assets.postgres.copy_out.kinds import INT8, TEXT, Kind
from cdc_assets.postgres.copy_out.libpq import LibpqSession
from cdc_assets.postgres.copy_out.session import DirectSession, Session, open_session
from cdc_assets.postgres.session.wires import TlsWire
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.support.waiting import wait_for

INT4 = Kind("int4", pa.int32())
# SQL of values by row number i, and how they are sent.
COLUMNS = {
    "i": INT4,
    "nullif(i % 3, 0) = 1": Kind("bool", pa.bool_()),
    "i::int2": Kind("int2", pa.int16()),
    "nullif(i, 7)::int8": INT8,
    "(i / 7.0)::float8": Kind("float8", pa.float64()),
    "case when i % 5 > 0 then repeat('é', i % 40) end": TEXT,
    "decode(lpad(to_hex(i), 8, '0'), 'hex')": Kind("bytea", pa.binary()),
    "((i - 5000) * 100003 / 100.0)::numeric(15,2)": Kind("numeric", pa.decimal128(15, 2)),
    "(nullif(i % 10, 0) / 10000.0)::numeric(18,5)": Kind("numeric", pa.decimal128(18, 5)),
    "array(select generate_series(1, i % 6))::int4[]": Kind("int4[]", pa.list_(pa.int32())),
    "array['a', null, i::text]": Kind("text[]", pa.list_(pa.string())),
}
QUERY = f"select {', '.join(COLUMNS)} from generate_series(1, 20000) i"


@pytest.fixture(params=["plaintext", "tls", "libpq"])
def opened(request: pytest.FixtureRequest, postgres_dsn: NewDatabase) -> Iterator[Session]:
    if request.param == "tls":
        session = open_session(request.getfixturevalue("secured"))
        assert isinstance(session, DirectSession)
        assert isinstance(session._wire, TlsWire)
    elif request.param == "libpq":
        session = LibpqSession(psycopg.connect(postgres_dsn(), autocommit=True))
    else:
        session = open_session(postgres_dsn())
        assert isinstance(session, DirectSession)
        assert not isinstance(session._wire, TlsWire)
    with closing(session):
        yield session


def _rows(session: Session, query: str, kinds: Sequence[Kind]) -> list[tuple[Any, ...]]:
    batches = session.read(query, kinds)
    return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]


def test_rows_are_those_that_psycopg_reads(opened: Session, postgres_dsn: NewDatabase) -> None:
    with psycopg.connect(postgres_dsn()) as client:
        expected = client.execute(QUERY.encode()).fetchall()
    found = _rows(opened, QUERY, list(COLUMNS.values()))
    assert found == expected
    assert found[6][3] is None
    assert found[0][7] == Decimal("-4999149.97")


def test_statements_and_reads_follow_one_another(opened: Session) -> None:
    opened.execute("begin; set local extra_float_digits to 1")
    for _ in range(3):
        assert _rows(opened, "select 1, 'a'", [INT4, TEXT]) == [(1, "a")]
        assert _rows(opened, "select 1 where false", [INT4]) == []
    opened.execute("select set_config('application_name', 'x', false)")
    opened.execute("commit")
    assert _rows(opened, "select current_setting('application_name')", [TEXT]) == [("x",)]


def test_an_error_has_its_state_and_a_rollback_goes_on(opened: Session) -> None:
    opened.execute("begin")
    with pytest.raises(psycopg.errors.DivisionByZero, match="division by zero"):
        _rows(opened, "select 1 / (5 - i) from generate_series(1, 9) i", [INT4])
    with pytest.raises(psycopg.errors.InFailedSqlTransaction):
        opened.execute("select 1")
    opened.execute("rollback")
    with pytest.raises(psycopg.errors.UndefinedTable):
        _rows(opened, "select * from nothing", [INT4])
    assert _rows(opened, "select 1", [INT4]) == [(1,)]
    assert not opened.closed


def test_a_backend_that_is_ended_is_an_outage(opened: Session, postgres_dsn: NewDatabase) -> None:
    pid = _rows(opened, "select pg_backend_pid()", [INT4])[0][0]
    with pytest.raises(psycopg.OperationalError):
        _rows(opened, f"select 1 from pg_terminate_backend({pid}), pg_sleep(5)", [INT4])
    assert opened.closed
    with pytest.raises(psycopg.OperationalError):
        opened.execute("select 1")


def test_a_read_that_is_given_up_ends_its_backend(opened: Session, request: Any) -> None:
    name = f"given up {request.node.callspec.params['opened']}"
    opened.execute(f"set application_name to '{name}'")
    batches = opened.read("select generate_series(1, 100000000)", [INT4])
    next(batches)
    server = (
        request.getfixturevalue("secured")
        if "tls" in name
        else request.getfixturevalue("postgres_dsn")()
    )
    batches.close()  # type: ignore[attr-defined]
    assert opened.closed
    with psycopg.connect(server, autocommit=True) as client:
        there = "select from pg_stat_activity where application_name = %s"
        wait_for(lambda: not client.execute(there, [name]).fetchall())


def test_a_row_of_sixteen_hundred_columns_and_one_of_forty_megabytes(opened: Session) -> None:
    many = ", ".join(f"nullif({n}, 700)" for n in range(1_600))
    row = _rows(opened, f"select {many}", [INT4] * 1_600)[0]
    assert row == tuple(None if n == 700 else n for n in range(1_600))
    large = _rows(opened, "select repeat('x', 40000000), 1 union all select 'y', 2", [TEXT, INT4])
    assert [(len(text), number) for text, number in large] == [(40_000_000, 1), (1, 2)]


def test_another_number_of_columns_than_asked_for_is_an_error(opened: Session) -> None:
    with pytest.raises(psycopg.Error, match="another number of fields"):
        _rows(opened, "select 1, 2", [INT4])
    assert opened.closed


def test_an_array_of_more_dimensions_is_refused(opened: Session) -> None:
    kind = Kind("text[]", pa.list_(pa.string()))
    assert _rows(opened, "select '{}'::text[]", [kind]) == [([],)]
    with pytest.raises(psycopg.Error, match="more than one dimension"):
        _rows(opened, "select '{{a,b},{c,d}}'::text[]", [kind])
