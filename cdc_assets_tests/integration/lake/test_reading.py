"""The lines by which README and guide have the lake read, as they stand, for a role that reads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict
from pyspark.sql.connect.session import SparkSession as RemoteSession

import cdc_assets
from cdc_assets.config.addresses import source_dsn
from cdc_assets.lake.spark.jars import PACKAGES
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets_tests.support.lake import Lake, NewLake

pytestmark = pytest.mark.spark

ROOT = Path(cdc_assets.__file__).parents[1]
SETUP = """
create table orders (id int primary key, amount numeric(10,2));
insert into orders select i, i * 1.5 from generate_series(1, 300) i;
"""
CHANGES = (
    "update orders set amount = amount + 1 where id % 7 = 0; delete from orders where id % 5 = 0",
    "update orders set amount = 0 where id % 11 = 0; insert into orders values (5000, 500)",
)
GRANTS = """
create role reader login password 'pw';
grant usage on schema _pg2iceberg to reader;
grant select on _pg2iceberg.iceberg_tables, _pg2iceberg.iceberg_namespace_properties to reader;
"""


def lines(page: str) -> str:
    """The page's only block that loads the catalog."""
    text = (ROOT / page).read_text(encoding="utf-8")
    [found] = re.findall(r"^    from pyiceberg\.catalog .*\n(?:    .*\n)+", text, re.MULTILINE)
    return dedent(found)


@pytest.fixture(params=[2, 3], ids="v{}".format)
def source(copied_lake: NewLake, request: pytest.FixtureRequest) -> Iterator[Lake]:
    with copied_lake(SETUP, "orders", name="app", lake={"format_version": request.param}) as made:
        for change in CHANGES:
            made.execute(change)
            made.catch_up()
        made.execute(GRANTS)
        try:
            yield made
        finally:
            made.execute("drop owned by reader; drop role reader")


def ran(page: str, source: Lake) -> dict[str, Any]:
    """What the lines have made, with the address put in."""
    there = conninfo_to_dict(source_dsn(source.config))
    example = "//reader@db.example.com/app"
    assert example in lines(page)
    ours = f"//reader:pw@{there['host']}:{there['port']}/{there['dbname']}"
    made: dict[str, Any] = {}
    exec(lines(page).replace(example, ours), made)
    made["lake"].close()
    return made


def test_pyiceberg_and_duckdb_read_the_rows_of_the_source(source: Lake) -> None:
    expected = source.execute("select id, amount from orders where amount > 100 order by id")
    assert len(expected) > 100
    for page in ("README.md", "docs/operate/reading.md"):
        made = ran(page, source)
        read = sorted((row["id"], row["amount"]) for row in made["rows"].to_pylist())
        assert read == expected, page
        if page == "README.md":
            assert made["total"] == (len(expected), sum(amount for _, amount in expected))


def test_spark_reads_the_rows_of_the_source(source: Lake, spark_server: SparkServer) -> None:
    page = (ROOT / "docs/operate/reading.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```properties\n(.*?)```\n\n```sql\n", page, re.DOTALL)
    [query] = re.findall(r"```sql\n(.*?)```", page, re.DOTALL)
    settings = dict(line.split(maxsplit=1) for line in block.splitlines())
    assert set(settings.pop("spark.jars.packages").split(",")) <= {*PACKAGES}
    there = conninfo_to_dict(source_dsn(source.config))
    ours = f"//{there['host']}:{there['port']}/{there['dbname']}"
    session = RemoteSession.builder.remote(spark_server.ensure()).create()
    try:
        for name, value in settings.items():
            told = value.replace("//db.example.com/app", ours).replace("…", "pw")
            session.conf.set(name, told)
        found = sorted((row["id"], row["amount"]) for row in session.sql(query).collect())
    finally:
        session.stop()
    expected = source.execute("select id, amount from orders where amount > 100 order by id")
    assert found == expected and len(found) > 100


def test_a_role_without_these_rights_reads_nothing(source: Lake) -> None:
    source.execute("revoke select on _pg2iceberg.iceberg_tables from reader")
    with pytest.raises(Exception, match="permission denied"):
        ran("README.md", source)
