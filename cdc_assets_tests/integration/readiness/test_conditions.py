"""A condition that isn't run says why, and what may be compared instead."""

from __future__ import annotations

import psycopg
import pytest

from cdc_assets.errors import TableProblem
from cdc_assets.postgres.names import TableId
from cdc_assets.readiness.source.planning import understood
from cdc_assets_tests.conftest import NewDatabase

SETUP = """
create type mood as enum ('sad', 'ok');
create domain small as int check (value < 10);
create table t (id int primary key, m mood, "D d" small);
"""


@pytest.mark.parametrize(
    ("where", "column"),
    [
        ("m = 'sad'", "m: public.mood"),
        ("m::text = 'sad'", "m: public.mood"),
        ('id > 1 and "D d" < 3', '"D d": public.small'),
    ],
)
def test_a_column_of_a_type_of_others_is_named(
    postgres_dsn: NewDatabase, where: str, column: str
) -> None:
    with psycopg.connect(postgres_dsn(), autocommit=True) as source:
        source.execute(SETUP)
        source.execute("set search_path = pg_catalog")
        with pytest.raises(TableProblem) as caught:
            understood(source, TableId("public", "t"), where)
        assert column in caught.value.what and "be it an enum" in caught.value.what
        assert "::text, is refused" in caught.value.remedy
