"""Consumer groups that are second lakes (``relay``): whose they are, and what their logs have."""

from __future__ import annotations

from cdc_assets.log.store import LogStore
from cdc_assets.postgres.names import TableId

# Keys in pipeline_meta of a second source: the first one's name, and the group there.
LOG_OF, LOG_GROUP = "log_of", "log_group"

_KEPT = """
select min(o.start_offset)
  from pipeline_meta f
  join pipeline_meta n on n.source = f.source and n.key = %(log_group)s
  join mat_cursor g on g.consumer_group = n.value and g.source = f.value
  join tables a on a.source = g.source and a.table_name = g.table_name and a.oid <> 0
 cross join lateral (
       select start_offset from log_index
        where source = f.source and table_name = g.table_name order by start_offset limit 1) o
 where f.key = %(log_of)s and f.value = %(first)s and g.table_name = %(table)s
"""


def lake_of_group(first: LogStore, group: str) -> str | None:
    """The second source whose lake the group is; None if it is of programs, or of nobody yet."""
    row = first.connection.execute(
        "select o.source from pipeline_meta o join pipeline_meta g using (source)"
        " where o.key = %s and o.value = %s and g.key = %s and g.value = %s",
        (LOG_OF, first.source, LOG_GROUP, group),
    ).fetchone()
    return str(row[0]) if row else None


def kept_from(first: LogStore, table: TableId) -> int | None:
    """The first offset that a second log still has, whose lake holds the table; None if none does.

    Its own maintenance removes what its lake table is past, by that one's own word, and in order.
    """
    row = first.connection.execute(
        _KEPT,
        {
            "first": first.source,
            "table": str(table),
            "log_of": LOG_OF,
            "log_group": LOG_GROUP,
        },
    ).fetchone()
    return None if row is None else row[0]
