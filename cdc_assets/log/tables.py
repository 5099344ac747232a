"""The tables of a source as the log knows them: their definitions and states.

``waiting`` for a snapshot, ``copying``, ``streaming`` (its log is applied), ``copied`` (its log
never will be), ``parked`` with a reason. An epoch is one copy of a table; a later one replaces it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import LiteralString

from psycopg.rows import dict_row

from cdc_assets.log.session import LogSession
from cdc_assets.log.states import TableState
from cdc_assets.log.table_row import TableRow, table_row
from cdc_assets.postgres.catalog import SourceTable
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId

# Why a table is let go that a person has given up.
GIVEN_UP = "it was dropped."
# The one group of consumers that merges into the lake; the schema has room for others.
GROUP = "lake"


_LET_GO: LiteralString = (
    "update tables set oid = 0, followed = false, log_from = null, pin = null, published_as = null,"
    " mask_wish = null, filter_wish = null,"
    " epoch = epoch + (snapshot_lsn is not null)::int, snapshot_lsn = null, complete_lsn = null,"
    " state = 'parked', updated_at = now()"
)


@dataclass(frozen=True, slots=True)
class CopyState:
    """The part of a table's row that decides whether a copy goes on."""

    epoch: int
    state: TableState
    pin: str | None
    reason: str | None


class TableRegistry(LogSession):
    """Reads and writes the records of a source's tables."""

    def revision(self) -> int:
        """A number that changes whenever a registered table does; polling it is cheap."""
        row = self.connection.execute(
            "select coalesce(sum(hashtextextended(table_name || xmin::text, 0)), 0)::text"
            " from tables where source = %s",
            (self.source,),
        ).fetchone()
        return int(row[0]) if row else 0

    def tables(self, only: TableId | None = None, *states: TableState) -> list[TableRow]:
        """The registered tables by name: all, or ``only`` that one, or those in ``states``."""
        with self.connection.cursor(row_factory=dict_row) as cursor:
            rows = cursor.execute(
                'select table_name as "table", oid, epoch, state, key_columns, columns::text,'
                " snapshot_lsn, complete_lsn, pin::text, reason, excluded, followed, published_as,"
                " mode, excluded_numbers, inserts_only, left_out, text_numbers, masks,"
                " mask_numbers, mask_wish, filter_wanted, row_filter, filter_wish, log_from"
                " from tables"
                " where source = %(source)s and table_name = coalesce(%(only)s, table_name)"
                " and (state = any(%(states)s) or %(states)s = '{}') order by table_name",
                {"source": self.source, "only": only and str(only), "states": [*states]},
            ).fetchall()
        return [table_row(row) for row in rows]

    def table(self, table: TableId) -> TableRow | None:
        return next(iter(self.tables(table)), None)

    def copy_state(self, table: TableId) -> CopyState | None:
        """The state of the table's copy: cheap enough to be read twice a second."""
        row = self.connection.execute(
            "select epoch, state, pin::text, reason from tables"
            " where source = %s and table_name = %s",
            (self.source, str(table)),
        ).fetchone()
        if row is None:
            return None
        epoch, state, pin, reason = row
        return CopyState(epoch, TableState(state), pin, reason)

    def add_table(
        self,
        table: SourceTable,
        excluded: Iterable[str] = (),
        mode: str = "mirror",
        *,
        masks: Mapping[str, str] | None = None,
        where: str | None = None,
        inserts_only: bool = False,
        left_out: Iterable[str] = (),
        withheld: Iterable[int] = (),
    ) -> None:
        """Register a table that waits for its pin; a registered table stays as it is.

        A waiting table of which no chunk was read yet is described anew. ``excluded`` columns never
        leave the source; ``withheld``: the numbers of excluded columns that aren't among the
        table's columns. ``masks``: the rules of masked columns. ``where``: the filter of its rows.
        Another name that the table had before is parked.
        """
        self._let_go_of_former_names(table)
        names, masks = sorted(excluded), masks or {}
        by_number = {c.number: masks[c.name] for c in table.columns if c.name in masks}
        self.connection.execute(
            "insert into tables as t"
            " (source, table_name, oid, state, key_columns, columns, excluded, mode,"
            "  excluded_numbers, inserts_only, left_out, masks, mask_numbers, filter_wanted)"
            " values (%s, %s, %s, 'waiting', %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)"
            " on conflict (source, table_name) do update set oid = excluded.oid,"
            " state = 'waiting', key_columns = excluded.key_columns, columns = excluded.columns,"
            " excluded = excluded.excluded, excluded_numbers = excluded.excluded_numbers,"
            " text_numbers = case when t.oid = excluded.oid then t.text_numbers else '{}' end,"
            " mode = excluded.mode, inserts_only = excluded.inserts_only,"
            " left_out = excluded.left_out, masks = excluded.masks,"
            " mask_numbers = excluded.mask_numbers, filter_wanted = excluded.filter_wanted,"
            " row_filter = case when excluded.filter_wanted is null"
            " or excluded.filter_wanted = t.filter_wanted then t.row_filter end,"
            " updated_at = now(),"
            " reason = case when t.oid <> 0 then t.reason end,"
            " (followed, log_from) = ("
            "  select t.followed and same, case when same then t.log_from end"
            "  from (select (t.oid, t.key_columns, t.excluded, t.inserts_only, t.masks)"
            "   = (excluded.oid, excluded.key_columns, excluded.excluded, excluded.inserts_only,"
            "      excluded.masks) as same) as asked)"
            " where t.oid = 0 or (t.state = 'waiting' and t.snapshot_lsn is null)",
            (
                self.source,
                str(table.id),
                table.oid,
                list(table.key_columns),
                json.dumps([c.to_json() for c in table.columns]),
                names,
                mode,
                sorted({*withheld, *(c.number for c in table.columns if c.name in names)}),
                inserts_only,
                list(left_out),
                json.dumps(masks),
                json.dumps(by_number),
                where,
            ),
        )

    def _let_go_of_former_names(self, table: SourceTable) -> None:
        """Park a renamed table's former names: its changes belong to its latest name's log alone.

        A table that gets a former name is another one.
        """
        self.connection.execute(
            f"{_LET_GO}, reason = case state when 'parked' then reason else %s end"
            " where source = %s and oid = %s and table_name <> %s",
            (f"it is called {table.id} now.", self.source, table.oid, str(table.id)),
        )

    def let_go(self, table: TableId, reason: str) -> None:
        """Forget what a table that is given up was like; if it is configured again, it is new."""
        self.connection.execute(
            f"{_LET_GO}, paused_at = null, reason = %s where source = %s and table_name = %s",
            (reason, self.source, str(table)),
        )

    def mark_followed(self, tables: Iterable[TableRow]) -> None:
        """Record that the streaming flusher now stages these tables as ``tables`` describes them.

        A table that was described anew meanwhile stays unmarked.
        """
        with self.connection.cursor() as cursor:
            cursor.executemany(
                "update tables set followed = true where source = %s and table_name = %s"
                " and not followed"
                " and (oid, key_columns, excluded, inserts_only, masks)"
                "  = (%s, %s, %s, %s, %s::jsonb)",
                [
                    (
                        self.source,
                        str(row.table),
                        row.oid,
                        list(row.key_columns),
                        sorted(row.excluded),
                        row.inserts_only,
                        json.dumps(dict(row.masks)),
                    )
                    for row in tables
                ],
            )

    def add_covered(
        self, table: TableId, excluded: Iterable[int], masked: Mapping[int, str]
    ) -> None:
        """Remember numbers of excluded and masked columns that came after the registration."""
        self.connection.execute(
            "update tables set excluded_numbers = array("
            " select distinct n from unnest(excluded_numbers || %s::int[]) n order by n),"
            " mask_numbers = %s::jsonb || mask_numbers where source = %s and table_name = %s",
            (sorted(excluded), json.dumps(masked), self.source, str(table)),
        )

    def set_masks(self, table: TableId, masks: Mapping[str, str]) -> None:
        """Change the rules of columns that the table doesn't have; those that it has stay."""
        self.connection.execute(
            "update tables set masks = %s where source = %s and table_name = %s",
            (json.dumps(masks), self.source, str(table)),
        )

    def wish(self, table: TableId, masks: Mapping[str, str], where: str | None) -> None:
        """Have the next copy of a table made with these masks and filter, whoever makes it."""
        self.connection.execute(
            "update tables set mask_wish = %(masks)s::jsonb, filter_wish = %(where)s,"
            " followed = followed and masks = %(masks)s::jsonb,"
            " log_from = case when masks = %(masks)s::jsonb then log_from end"
            " where source = %(source)s and table_name = %(table)s",
            {
                "masks": json.dumps(masks),
                "where": where,
                "source": self.source,
                "table": str(table),
            },
        )

    def keep_as_text(self, table: TableId, numbers: Iterable[int]) -> None:
        """Remember the attribute numbers of columns that the table's next copy keeps as text."""
        self.connection.execute(
            "update tables set text_numbers = array("
            " select distinct n from unnest(text_numbers || %s::int[]) n order by n)"
            " where source = %s and table_name = %s",
            (sorted(numbers), self.source, str(table)),
        )

    def park_unknown(self, table: TableId, reason: str) -> None:
        """Register a table that the source doesn't have; ``add_table`` revives it later."""
        self.connection.execute(
            "insert into tables (source, table_name, oid, state, key_columns, columns, reason)"
            " values (%s, %s, 0, 'parked', '{}', '[]', %s) on conflict (source, table_name)"
            " do update set state = 'parked', reason = excluded.reason"
            " where tables.oid = 0"
            " and (tables.state, tables.reason) is distinct from ('parked', excluded.reason)",
            (self.source, str(table), reason),
        )

    def note_waiting(self, table: TableId, reason: str | None) -> None:
        """Record what a table waits for, if anything; also for one that isn't described yet."""
        self.connection.execute(
            "insert into tables as t"
            " (source, table_name, oid, state, key_columns, columns, reason)"
            " values (%s, %s, 0, 'waiting', '{}', '[]', %s) on conflict (source, table_name)"
            " do update set reason = excluded.reason, updated_at = now()"
            " where t.state = 'waiting' and t.reason is distinct from excluded.reason",
            (self.source, str(table), reason),
        )

    def note_held_up(self, table: TableId, reason: str | None, epoch: int) -> None:
        """Record why nothing is applied to a table that streams, until that is over (None)."""
        self.connection.execute(
            "update tables set reason = %s, updated_at = now() where source = %s"
            " and table_name = %s and epoch = %s and state = 'streaming'"
            " and reason is distinct from %s",
            (reason, self.source, str(table), epoch, reason),
        )

    def park(self, table: TableId, reason: str, epoch: int | None = None) -> None:
        """Park a registered table, with the reason and the way out.

        With ``epoch`` only while the table has that epoch: a new copy may mend the problem.
        """
        self.connection.execute(
            "update tables set state = 'parked', reason = %(reason)s, updated_at = now()"
            " where source = %(source)s and table_name = %(table)s"
            " and epoch = coalesce(%(epoch)s, epoch)",
            {"reason": reason, "source": self.source, "table": str(table), "epoch": epoch},
        )

    def park_log(self, table: TableId, reason: str, committed: Lsn) -> bool:
        """Park a table whose log lacks a transaction that committed at ``committed``.

        False if the table is parked already, or its copy has the transaction. A table that waits
        for a pin gets a new epoch, and so a pin made from now on, which has the transaction.
        """
        waits = self.connection.execute(
            "update tables set epoch = epoch + 1, log_from = null, updated_at = now()"
            " where source = %s and table_name = %s and state = 'waiting' and snapshot_lsn is null",
            (self.source, str(table)),
        )
        if waits.rowcount:
            return False
        done = self.connection.execute(
            "update tables set state = 'parked', reason = %s, updated_at = now()"
            " where source = %s and table_name = %s and snapshot_lsn <= %s"
            " and state in ('waiting', 'copying', 'streaming')",
            (reason, self.source, str(table), str(committed)),
        )
        return done.rowcount == 1

    def set_published_as(self, table: TableId, published_as: str | None, epoch: int) -> None:
        """Remember the publication's entry that the table's changes of an epoch come through."""
        self.connection.execute(
            "update tables set published_as = %s"
            " where source = %s and table_name = %s and epoch = %s",
            (published_as, self.source, str(table), epoch),
        )

    def set_row_filter(self, table: TableId, row_filter: str | None, epoch: int) -> None:
        """Remember the filter of an epoch's rows as the server writes it."""
        self.connection.execute(
            "update tables set row_filter = %s"
            " where source = %s and table_name = %s and epoch = %s",
            (row_filter, self.source, str(table), epoch),
        )

    def set_columns(self, row: TableRow) -> None:
        """Remember the columns and the key of the lake table, which is the truth."""
        self.connection.execute(
            "update tables set columns = %s, key_columns = %s, updated_at = now()"
            " where source = %s and table_name = %s and epoch = %s and state = 'streaming'",
            (
                json.dumps([c.to_json() for c in row.columns]),
                list(row.key_columns),
                self.source,
                str(row.table),
                row.epoch,
            ),
        )

    def not_whole_before(self, row: TableRow, lsn: Lsn) -> None:
        """Raise ``complete_lsn`` to at least ``lsn``: rows of the table were read as of it."""
        self.connection.execute(
            "update tables set complete_lsn = greatest(complete_lsn, %s)"
            " where source = %s and table_name = %s and epoch = %s",
            (str(lsn), self.source, str(row.table), row.epoch),
        )
