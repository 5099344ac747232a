"""A batch that ends the Spark server is tried once more, and then its table is parked.

It would end every server that is started, and no table's log would be applied any more. So a merge
during which the server was lost is counted, by the offset that its batch begins at. Several merges
may lose the same server, and only one of them can have ended it: a batch that was counted once is
merged alone from then on, so that a second loss is its own, unless a copy, a check, care or
``verify`` ran beside it. Costs one query a merge.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import psycopg
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from cdc_assets.errors import Fenced, TableProblem
from cdc_assets.lake.spark.session import lost_server
from cdc_assets.lake.tables import LakeTable
from cdc_assets.lake.values import naming_refusals
from cdc_assets.log.locks import ALONE_LOCK
from cdc_assets.log.store import LogStore
from cdc_assets.messages.texts import command

logger = logging.getLogger(__name__)

LIMIT = 2
# How long a counted batch waits while another one is merged alone.
_ALONE_SECONDS = 60.0

_TIMES = """
select times from lost_merges
 where source = %(source)s and table_name = %(table)s
   and epoch = %(epoch)s and "offset" = %(offset)s
"""
_COUNT = """
insert into lost_merges as m (source, table_name, epoch, "offset", times)
values (%(source)s, %(table)s, %(epoch)s, %(offset)s, 1)
    on conflict (source, table_name) do update set epoch = excluded.epoch,
       "offset" = excluded."offset", times = 1 + case
         when (m.epoch, m."offset") = (excluded.epoch, excluded."offset") then m.times else 0 end
returning times
"""
_FORGET = "delete from lost_merges where source = %(source)s and table_name = %(table)s"


@contextmanager
def merging(store: LogStore, session: SparkSession, lake: LakeTable, offset: int) -> Iterator[None]:
    """Guard a merge of the batch that begins at ``offset``.

    Parks the table and raises TableProblem for a batch that ended two servers, or has a value that
    a key's column can't hold; raises Fenced where another suspect is being merged.
    """
    which = {
        "source": store.source,
        "table": str(lake.row.table),
        "epoch": lake.row.epoch,
        "offset": offset,
    }
    suspect = store.connection.execute(_TIMES, which).fetchone() is not None
    if not suspect:
        with _counted(store, lake, which):
            yield
        return
    if not store.lock_within(ALONE_LOCK, _ALONE_SECONDS):
        raise Fenced(f"{lake.row.table}: another batch is merged alone; this one comes after it.")
    try:
        _ = session.version  # raises if the server is gone already: this batch didn't end it
        with _counted(store, lake, which):
            yield
        store.connection.execute(_FORGET, which)
    finally:
        with suppress(psycopg.OperationalError):  # a session that is gone has no locks
            store.unlock(ALONE_LOCK)


@contextmanager
def _counted(store: LogStore, lake: LakeTable, which: Mapping[str, object]) -> Iterator[None]:
    try:
        with naming_refusals(store, lake):
            yield
    except PySparkException as error:
        if lost_server(error):
            _count(store, lake, which, error)
        raise


def _count(
    store: LogStore, lake: LakeTable, which: Mapping[str, object], error: PySparkException
) -> None:
    row = store.connection.execute(_COUNT, which).fetchone()
    assert row is not None
    times, table = int(row[0]), lake.row.table
    logger.error(
        "%s: the Spark server was lost in a merge from offset %s on (%s. time)",
        table,
        which["offset"],
        times,
    )
    if times < LIMIT:
        return
    problem = TableProblem(
        table,
        f"{times} Spark servers ended while its log was merged from offset {which['offset']} on",
        "Their log says why (spark-….log in the runtime home). Give spark.memory more, or keep a"
        f" column as text (columns.types), and: {command('resync', table)}",
    )
    store.connection.execute(_FORGET, which)
    store.park(table, problem.reason, lake.row.epoch)
    raise problem from error
