"""What may be queried, and what keeps its changes apart from ours: views and foreign tables.

**A view** over tables of this database is as good as a table: whoever changes its rows has a
transaction here, which a poll notes. Its watermark has to be set by a change of any of its tables:
``greatest(a.updated_at, b.updated_at)`` of a join.

**A foreign table**'s rows are written at another server, whose transactions aren't seen here, and
**a materialized view** shows them by a REFRESH, long after they were written. There the rule of the
package knows no H, as on a standby, and the bound alone has to do. It is b(i) = the time of the
poll less ``lag``. A change that poll i doesn't see is written by a transaction that ended, or is
shown by a REFRESH that ended, after the poll has begun. If that transaction began less than ``lag``
before, then w >= b(i), and poll i + 1 finds it. So no change is lost whose watermark is younger
than ``lag`` when it can be seen first: ``lag`` is a must, and has to be longer than any transaction
that writes, and than the time between two REFRESHes; the difference of two servers' clocks is part
of it. What breaks that promise is lost until the rows are read again
(``cdc-assets backfill --replace``): looking for deletes reads no rows.

The same holds of a view that has any of these below it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import LiteralString

from cdc_assets.config.query.sections import WatermarkConfig
from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import TableProblem
from cdc_assets.log.relation import keyed
from cdc_assets.postgres.catalog import QUERIED_KINDS, SourceTable, describe_all, elsewhere
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.session.connect import Connection
from cdc_assets.postgres.session.waits import BELOW

_UNSEEN: LiteralString = f"""
with recursive below (root, oid) as (
    select o, o from unnest(%s::oid[]) o
    union
    select b.root, d.oid from below b, lateral ({BELOW.format("b.oid")}) d (oid))
select distinct on (b.root) b.root::bigint, n.nspname::text, c.relname::text
  from below b
  join pg_catalog.pg_class c on c.oid = b.oid and c.relkind in ('f', 'm')
  join pg_catalog.pg_namespace n on n.oid = c.relnamespace
 order by b.root, b.oid <> b.root, c.oid
"""


def described(
    source: Connection, config: SourceConfig, tables: Sequence[TableId]
) -> dict[TableId, SourceTable | TableProblem]:
    """Each table as the source and the configuration of its key have it, or why it can't be taken.

    Where changes come by a slot, only tables have any.
    """
    found = describe_all(source, tables)
    return {
        table: one if isinstance(one, TableProblem) else _taken(config, one)
        for table, one in found.items()
    }


def _taken(config: SourceConfig, found: SourceTable) -> SourceTable | TableProblem:
    if config.query is None:
        if found.kind not in QUERIED_KINDS:
            return found
        return TableProblem(
            found.id,
            "it is not a table: views and foreign tables have no changes in the WAL",
            "Replicate the tables underneath it; or have it asked for its rows (query:).",
        )
    key, names = config.table(found.id).key, {column.name for column in found.columns}
    if key and found.key_columns:
        return TableProblem(
            found.id,
            f"it has a key of its own ({', '.join(found.key_columns)}), and key: is for those that"
            " have none",
            "Take key: out of the configuration.",
        )
    if unknown := [name for name in key if name not in names]:
        return TableProblem(
            found.id, f"key: names {unknown[0]}, and it has no such column", "Correct key:."
        )
    return keyed(found, key)


def unseen(source: Connection, oids: Collection[int]) -> Mapping[int, TableId]:
    """By oid, what is below a relation, or is it, that transactions unseen here write to."""
    rows = source.execute(_UNSEEN, (list(oids),)) if oids else ()
    return {int(oid): TableId(schema, name) for oid, schema, name in rows}


def refuse_unseen(found: SourceTable, of: WatermarkConfig, unseen: TableId | None) -> None:
    """Raise TableProblem for what needs a lag and has none; a view may have become that."""
    if unseen is None:
        return
    if found.kind not in QUERIED_KINDS:
        raise elsewhere(found.id, unseen)
    if not of.units:
        what = "is itself" if unseen == found.id else f"has {unseen} below it,"
        raise TableProblem(
            found.id,
            f"it {what} a foreign table or a materialized view, whose rows are written by"
            " transactions that aren't seen here: without a lag, what a long one changes is lost",
            "Set watermark.lag (lag_numbers) to more than any transaction that writes to it takes,"
            " and than the time between two REFRESHes.",
        )
