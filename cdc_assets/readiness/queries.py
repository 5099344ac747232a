"""What query mode demands of a source and its tables."""

from __future__ import annotations

from collections.abc import Iterator

from cdc_assets.config.query.sections import WatermarkConfig
from cdc_assets.config.source import SourceConfig
from cdc_assets.config.tables import TableConfig
from cdc_assets.errors import TableProblem
from cdc_assets.messages.findings import Finding
from cdc_assets.poller.relations import refuse_unseen
from cdc_assets.poller.shape import indexed
from cdc_assets.postgres.catalog import QUERIED_KINDS, Column, SourceTable
from cdc_assets.postgres.names import TableId, quoted
from cdc_assets.postgres.session.connect import Connection
from cdc_assets.readiness.asked.keys import unkept

_NUMBERS = ("smallint", "integer", "bigint")
# The sequences that a column's default or identity takes numbers from, with their cache.
_CACHE = """
select distinct s.seqrelid::pg_catalog.regclass::text, s.seqcache::bigint
  from pg_catalog.pg_attribute a
  left join pg_catalog.pg_attrdef f on f.adrelid = a.attrelid and f.adnum = a.attnum
  join pg_catalog.pg_depend d
    on (d.classid = 'pg_catalog.pg_attrdef'::pg_catalog.regclass and d.objid = f.oid
        and d.refclassid = 'pg_catalog.pg_class'::pg_catalog.regclass)
    or (d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass and d.refobjid = a.attrelid
        and d.refobjsubid = a.attnum and d.deptype = 'i')
  join pg_catalog.pg_sequence s
    on s.seqrelid = case when d.refobjid = a.attrelid then d.objid else d.refobjid end
 where a.attrelid = %s and a.attname = %s and s.seqcache > 1 order by 1
"""
# A server whose answer postgres_fdw waits for as long as it takes.
_UNTIMED = """
select pg_catalog.quote_ident(s.srvname)
  from pg_catalog.pg_class c
  join pg_catalog.pg_foreign_table f on f.ftrelid = c.oid
  join pg_catalog.pg_foreign_server s on s.oid = f.ftserver
  join pg_catalog.pg_foreign_data_wrapper w on w.oid = s.srvfdw and w.fdwname = 'postgres_fdw'
 where c.relname = %s and c.relnamespace = (
       select oid from pg_catalog.pg_namespace where nspname = %s)
   and not exists (select from unnest(s.srvoptions) o
                    where pg_catalog.starts_with(o, 'connect_timeout='))
"""


def refuse_watermark(config: SourceConfig, found: SourceTable, unseen: TableId | None) -> None:
    """Raise TableProblem for a table whose changes queries wouldn't find, or couldn't apply.

    ``unseen``: what of it transactions write to that aren't seen here (``poller.relations``).
    """
    if config.query is None:
        return
    of = config.table(found.id).watermark
    assert of is not None  # the configuration sees to it
    column = next((c for c in found.columns if c.name == of.column), None)
    is_table = found.kind not in QUERIED_KINDS
    if not found.key_columns:
        raise TableProblem(
            found.id,
            "it has no key, by which query mode tells which row has changed",
            "Name the columns that identify a row in key: of its configuration"
            + ("; better, give it a primary key." if is_table else "."),
        )
    if column is None:
        raise TableProblem(
            found.id,
            f"it has no column {of.column}, its watermark",
            "Correct watermark.column, or add the column with a trigger that sets it.",
        )
    if (wrong := _wrong_type(column, of)) is not None:
        raise TableProblem(found.id, wrong, "Choose another watermark.column or order.")
    refuse_unseen(found, of, unseen)
    if is_table and not column.not_null:
        raise TableProblem(
            found.id,
            f"its watermark {of.column} may be NULL: such a row is never found",
            f"alter table {found.id} alter column {quoted(of.column)} set not null;",
        )


def _wrong_type(column: Column, of: WatermarkConfig) -> str | None:
    is_time = column.type.startswith("timestamp") and not column.type.endswith("[]")
    if is_time if of.order == "clock" else column.type in _NUMBERS:
        return None
    wanted = "timestamp with time zone" if of.order == "clock" else ", ".join(_NUMBERS)
    return f"its watermark {of.column} is {column.type}, and order: {of.order} takes {wanted}"


def query_findings(
    source: Connection,
    config: SourceConfig,
    table: TableConfig,
    found: SourceTable,
    unseen: TableId | None,
) -> Iterator[Finding]:
    """What is to be said of a table in query mode."""
    if config.query is None:
        return
    try:
        refuse_watermark(config, found, unseen)
    except TableProblem as problem:
        yield Finding("watermark", "error", f"{problem.what}.", problem.remedy)
        return
    of = table.watermark
    assert of is not None
    column = next(c for c in found.columns if c.name == of.column)
    key = ", ".join(map(quoted, (of.column, *found.key_columns)))
    if table.key:
        yield from unkept(source, table, of.column)
    if unseen is not None:
        for (server,) in source.execute(_UNTIMED, (unseen.name, unseen.schema)):
            yield Finding(
                "foreign_server_untimed",
                "warning",
                f"{table.name}: {unseen} is at {server}, which has no connect_timeout: while that"
                " server takes connections and doesn't answer, no table of this source is polled.",
                f"alter server {server} options (add connect_timeout '10');",
            )
    # What a view or a foreign table is read by is an index elsewhere.
    has_indexes = found.kind not in ("v", "f")
    if has_indexes and (found.oid, of.column) not in indexed(source, [found.oid]):
        yield Finding(
            "watermark_unindexed",
            "warning",
            f"{table.name}: no index begins with {of.column}, so that each query reads the whole"
            " table.",
            f"create index concurrently on {found.id} ({key});",
        )
    if column.type.startswith("timestamp") and not column.type.endswith("with time zone"):
        yield Finding(
            "watermark_without_zone",
            "warning",
            f"{table.name}: {of.column} has no time zone, and is taken for UTC.",
            "Writers behind UTC need watermark.lag to be longer than that; better a timestamp with"
            " time zone.",
        )
    if of.order == "sequence" and not of.lag_numbers:
        for sequence, cache in source.execute(_CACHE, (found.oid, of.column)):
            yield Finding(
                "watermark_cached",
                "error",
                f"{table.name}: sessions take {cache} numbers of {sequence} at a time, and may use"
                " them at any later time, when higher ones have been found already.",
                f"alter sequence {sequence} cache 1; or say in watermark.lag_numbers how far"
                " behind a number may be",
            )


def lag_findings(source: Connection, config: SourceConfig) -> Iterator[Finding]:
    """A hot standby doesn't tell which transactions are running on its primary."""
    if config.query is None:
        return
    row = source.execute("select pg_catalog.pg_is_in_recovery()").fetchone()
    if not (row and row[0]):
        return
    of = [(table, table.watermark) for table in config.tables if table.watermark is not None]
    lacking = [table.name for table, each in of if not each.units]
    if lacking:
        yield Finding(
            "watermark_lag",
            "error",
            "this server is a standby, which doesn't tell which transactions are running; without"
            f" a lag, what a long one changes is lost: {', '.join(lacking[:5])}.",
            "Set watermark.lag (lag_numbers) of each table to more than any transaction that writes"
            " to it takes.",
        )
