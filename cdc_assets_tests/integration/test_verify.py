"""Verify finds what is wrong: it has to be able to fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cdc_assets.postgres.replication import create_slot
from cdc_assets.spark.server import SparkServer
from cdc_assets.verify import compare
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.lake_support import Lake, lake

pytestmark = pytest.mark.spark

SETUP = """
create table t (id int primary key, v text, n numeric(8,2), a text[], d double precision);
insert into t select i, 'v' || i, i, array['a b', null, '"'], i / 3.0 from generate_series(1, 50) i;
create table h (a int, b text);
insert into h select i % 3, 'x' from generate_series(1, 9) i;
"""


@pytest.fixture(scope="module")
def spark_url(spark_server: SparkServer) -> str:
    return spark_server.ensure()


@pytest.fixture
def source(postgres_dsn: NewDatabase, spark_url: str, tmp_home: Path) -> Iterator[Lake]:
    with lake(postgres_dsn(), spark_url, SETUP, "t", {"name": "h", "mode": "mirror"}) as opened:
        opened.pin()
        opened.copy()
        yield opened


def test_equal_tables_are_equal_at_one_lsn_even_with_changes_not_yet_applied(source: Lake) -> None:
    source.execute("update t set v = 'changed' where id < 10; delete from t where id = 11")
    source.execute("insert into h values (1, 'x'), (1, 'x'), (7, null)")
    found = source.verify()
    assert [c.equal for c in found] == [True, True]
    assert [c.source_rows for c in found] == [49, 12]


def test_every_kind_of_difference_is_found_and_named(source: Lake) -> None:
    for statement in (
        "delete from lake.src.t where id = 1",
        "update lake.src.t set v = 'wrong' where id = 2",
        "update lake.src.t set n = n + 0.01 where id = 3",
        "update lake.src.t set a = array('a b') where id = 4",
        "update lake.src.t set d = d + 1e-9 where id = 5",
        "update lake.src.t set v = null where id = 6",
        "insert into lake.src.t select * from lake.src.t where id = 7",
        "insert into lake.src.t values (99, 'surplus', 0, array(), 0)",
        "insert into lake.src.h values (1, 'x')",
    ):
        source.session.sql(statement)
    t, h = source.verify()
    assert not t.equal
    assert t.differing == 8
    assert [f'"id":"{i}"' in " ".join(t.keys) for i in (1, 2, 3, 4, 5, 6, 7, 99)] == [True] * 8
    assert (h.differing, h.keys) == (1, ('{"a":"1","b":"x"} (source 3, lake 4)',))


def test_a_table_that_is_truncated_while_it_is_read_is_compared_again(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []

    def truncate_after_the_pin(*arguments: object, **options: object) -> object:
        made = create_slot(*arguments, **options)  # type: ignore[arg-type]
        if not calls:
            source.execute("truncate h; insert into h values (5, 'new')")
        calls.append(made)
        return made

    monkeypatch.setattr(compare, "create_slot", truncate_after_the_pin)
    t, h = source.verify()
    assert (t.equal, h.equal, h.source_rows, len(calls)) == (True, True, 1, 2)
