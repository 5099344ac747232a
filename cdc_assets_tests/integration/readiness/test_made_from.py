"""A generated column shows nothing that is masked, whatever makes it, and whenever it came."""

from __future__ import annotations

from dataclasses import replace

import psycopg

from cdc_assets.config.source import parse_config
from cdc_assets.log.states import TableState
from cdc_assets.log.table_row import TableRow
from cdc_assets.postgres.names import TableId
from cdc_assets.readiness.source.enrolment import facts_of, shown_by_generated
from cdc_assets.readiness.source.tables import table_findings
from cdc_assets_tests.conftest import NewDatabase

T = TableId("public", "t")
SETUP = """
create table t (id int primary key, mail text, shown text generated always as ('x') stored)
  partition by range (id);
create table t1 (id int not null, mail text,
  shown text generated always as (upper(mail)) stored);
"""
ATTACH = "alter table t attach partition t1 for values from (0) to (100)"


def test_a_partition_may_make_a_column_from_another_one_than_its_root(
    postgres_dsn: NewDatabase,
) -> None:
    dsn = postgres_dsn()
    table = {"name": "t", "columns": {"mask": {"mail": "redact"}}}
    data = {"name": "s", "postgres": {"dsn": dsn}, "tables": [table]}
    config = parse_config(data, "test")
    with psycopg.connect(dsn, autocommit=True) as source:
        source.execute(SETUP)
        source.execute(
            "create publication cdc_s with (publish_generated_columns = stored)"
            if source.info.server_version >= 180000
            else "create publication cdc_s for table t (id, mail, shown)"
        )
        row = source.execute("select 't'::regclass::oid::int").fetchone()
        assert row is not None
        masked = TableRow(
            T,
            int(row[0]),
            1,
            TableState.STREAMING,
            ("id",),
            (),
            None,
            None,
            None,
            None,
            masks={"mail": "redact"},
        )
        assert [*shown_by_generated(source, config, [masked])] == []
        source.execute(ATTACH)
        [(_, found)] = shown_by_generated(source, config, [masked])
        assert "its generated column shown is made from mail" in found.message
        renamed = replace(masked, mask_numbers={2: "redact"})
        source.execute("alter table t rename mail to post")
        [(_, found)] = shown_by_generated(source, config, [renamed])
        assert "made from post, which is masked" in found.message
        source.execute("alter table t rename post to mail")
        facts = facts_of(source, config, [T])
        codes = {f.code for f in table_findings(source, config, config.tables[0], facts)}
        assert "mask_refused" in codes
