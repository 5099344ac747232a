"""Care of a table that ends the Spark server is tried twice, and then left alone for a day.

The schedule would try it again and again, each time with a new server, and no table's log is
applied while a server starts. Nobody waits for care, so the table streams on without it.
``materializer.lethal`` counts merges that end servers. Costs one query each time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.errors import PySparkException

from cdc_assets.errors import TableProblem
from cdc_assets.lake.spark.session import lost_server
from cdc_assets.log.store import LogStore
from cdc_assets.postgres.names import TableId

logger = logging.getLogger(__name__)

LIMIT = 2

_ENDED = """
select times from lost_care
 where source = %(source)s and table_name = %(table)s and what = %(what)s
   and ended_at > now() - interval '1 day'
"""
_COUNT = """
insert into lost_care as c (source, table_name, what, times, ended_at)
values (%(source)s, %(table)s, %(what)s, 1, now())
    on conflict (source, table_name, what) do update set ended_at = now(),
       times = 1 + case when c.ended_at > now() - interval '1 day' then c.times else 0 end
"""
_FORGET = (
    "delete from lost_care where source = %(source)s and table_name = %(table)s and what = %(what)s"
)


@contextmanager
def surviving(store: LogStore, table: TableId, what: str) -> Iterator[None]:
    """Around the care ``what`` of a table ("its compaction"): counts the servers it ends.

    Raises TableProblem, having tried nothing, if that care ended two servers within a day.
    """
    which = {"source": store.source, "table": str(table), "what": what}
    row = store.connection.execute(_ENDED, which).fetchone()
    if row is not None and row[0] >= LIMIT:
        raise TableProblem(
            table,
            f"{row[0]} Spark servers ended during {what}, which is left alone for a day",
            "Their log says why (spark-….log in the runtime home). Give spark.memory more.",
        )
    try:
        yield
    except PySparkException as error:
        if lost_server(error):
            logger.warning("%s: the Spark server was lost during %s", table, what)
            store.connection.execute(_COUNT, which)
        raise
    if row is not None:
        store.connection.execute(_FORGET, which)
