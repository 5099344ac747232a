"""Taking over a lake table that was there before us, without a copy (``tables[].adopt``).

The table's log begins as an incremental copy's does, at a proven horizon. Then the table is looked
at, under its writer's lock. Whatever is in the way is told, and nothing of the table is touched:
its log waits, and it is tried again with each merge. If nothing is, one commit without rows
names the first cursor:

- With a position (``lsn``, or a ``mark`` of ours that the table's rows are of) the table has what
  committed below it, and the log is applied from there on, which has to begin no later. Both are a
  person's word. So the table counts as not verified until a comparison has found all rows equal.
- Without one, nobody knows which changes the table lacks. It counts as changed by somebody else:
  its log waits until ``verify --repair`` has compared and corrected every row (``lake.standing``).
"""

from __future__ import annotations

from dataclasses import replace

from pyiceberg.table import Table
from pyspark.sql import SparkSession

from cdc_assets.errors import TableProblem
from cdc_assets.lake.adopted.fits import misfits
from cdc_assets.lake.columns import PROPERTY
from cdc_assets.lake.lineage import foreign_since, position
from cdc_assets.lake.publish import append, published
from cdc_assets.lake.spark.sql import listed
from cdc_assets.lake.tables import SOURCE, TABLE, LakeTable
from cdc_assets.log.asked.adoptions import Adopted, Adoption, adoption, begin_at, note_adopted
from cdc_assets.log.asked.marks import tag_of
from cdc_assets.log.store import LogStore
from cdc_assets.log.table_row import TableRow
from cdc_assets.messages.texts import command
from cdc_assets.postgres.lsn import Lsn

# Property of a lake table: which adoption it has been taken over by.
ADOPTED = "cdc.adopted"
# How a change by somebody else is called that nobody has seen (``lake.lineage.FOREIGN``).
WITHOUT_POSITION = "it was adopted without a position"


def is_adopted(loaded: Table | None, found: Adoption) -> bool:
    """Whether the lake table was taken over, by this very adoption."""
    return loaded is not None and loaded.properties.get(ADOPTED) == found.id


def left_alone(store: LogStore, row: TableRow) -> str | None:
    """Why a lake table isn't to be touched: it isn't ours yet."""
    found = adoption(store, row)
    waits = found is not None and found.state == Adopted.AWAITED
    return "it isn't adopted yet" if waits else None


def take_over(store: LogStore, session: SparkSession, lake: LakeTable) -> TableRow:
    """Adopt the lake table if that is due; returns the table's row as it is then.

    The caller has the table's lock. Raises TableProblem, with nothing touched, if it can't be.
    """
    found = adoption(store, lake.row)
    if found is None or found.state != Adopted.AWAITED:
        return lake.row
    loaded = lake.load()
    if loaded is None:
        raise _refused(lake, f"there is no lake table {lake.sql_name}")
    if not is_adopted(loaded, found):
        if problems := list(misfits(lake, loaded)):
            raise _refused(lake, *problems)
        position = _position(store, lake, loaded, found)
        if position is not None:
            begin_at(store, lake.row, position)
            lake = replace(lake, row=_row(store, lake.row))
        _take(store, session, lake, loaded, found, None if position else WITHOUT_POSITION)
    note_adopted(store, lake.row)
    return _row(store, lake.row)


def _row(store: LogStore, row: TableRow) -> TableRow:
    found = store.table(row.table)
    assert found is not None
    return found


def _take(
    store: LogStore,
    session: SparkSession,
    lake: LakeTable,
    loaded: Table,
    found: Adoption,
    foreign: str | None,
) -> None:
    if loaded.current_snapshot() is None:
        session.table(lake.sql_name).limit(0).writeTo(lake.sql_name).append()
    state = replace(lake.state(), foreign=foreign)
    with published(session, lake, state) as draft:
        append(session, lake, state, draft, store.first_cursor(lake.row))
    # Last: until then it is done once more, and nothing but that commit is there twice.
    ours = {
        SOURCE: lake.config.name,
        TABLE: str(lake.row.table),
        PROPERTY: lake.described(loaded.schema()).dump(),
        ADOPTED: found.id,
    }
    session.sql(f"alter table {lake.sql_name} set tblproperties ({listed(ours)})")


def _position(store: LogStore, lake: LakeTable, loaded: Table, found: Adoption) -> Lsn | None:
    """Below which LSN the table has what committed; None if that is to be found out by comparing.

    Raises TableProblem if it isn't known yet, or the log doesn't go on from there.
    """
    wanted, table = lake.table.adopt, lake.row.table
    if wanted is None:
        raise _refused(lake, "its configuration doesn't say adopt any more: put that back")
    if wanted.mark is not None:
        at = _marked(lake, loaded, wanted.mark)
    elif wanted.lsn is not None:
        at = Lsn.parse(wanted.lsn)
    elif wanted.wait:
        raise TableProblem(
            table,
            f"its log has begun, at {found.begin}, and its adoption waits for a position of that"
            " LSN or a later one",
            "End what fills the lake table, and name the LSN below which it has all changes:"
            " adopt: {lsn: …}; or adopt: true, if none is known.",
        )
    elif not lake.key:
        raise _refused(lake, "without a key its rows can't be corrected, so give adopt: {lsn: …}")
    else:
        return None
    if at < found.begin:
        repair = command("verify", "--table", table, "--repair")
        raise _refused(
            lake,
            f"it has what committed below {at}, and its log begins at {found.begin}: the changes"
            " between are in neither. Set adopt: true, and have its rows compared and corrected:"
            f" {repair}",
        )
    if not store.is_flushed(at):
        raise TableProblem(
            table,
            f"it is to be adopted at {at}, which the log hasn't reached ({store.flushed_lsn()})",
            "Wait; or correct adopt, if the source's WAL doesn't get there (another server's LSN).",
        )
    return at


def _marked(lake: LakeTable, loaded: Table, mark: str) -> Lsn:
    """The LSN of a mark of ours that the table's rows are of."""
    tag = tag_of(mark)
    ref = loaded.metadata.refs.get(tag)
    tagged = loaded.snapshot_by_id(ref.snapshot_id) if ref is not None else None
    if tagged is None:
        raise _refused(lake, f"it has no tag {tag}")
    at = position(loaded, tagged.snapshot_id)
    if at is None:
        raise _refused(lake, f"no commit before its tag {tag} says an LSN: give adopt: {{lsn: …}}")
    if at.foreign is not None:
        raise _refused(lake, f"its tag {tag} has rows of somebody else's: {at.foreign}")
    # One of ours without rows may be this adoption's, whose process died after it.
    changed = foreign_since(loaded, tagged.snapshot_id, or_ours=True)
    if changed is None:
        return at.cursor.applied_lsn
    raise _refused(
        lake,
        f"it has other rows than at its tag {tag}: {changed}. Set it back first:"
        f" rollback_to_snapshot, to {tagged.snapshot_id}",
    )


def _refused(lake: LakeTable, *problems: str) -> TableProblem:
    table = lake.row.table
    return TableProblem(
        table,
        f"its lake table can't be adopted: {'; '.join(problems)}",
        "Nothing of it was touched, and its log waits. Or take adopt away, and have it copied, into"
        f" a table of another name (as:): {command('resync', table)}",
    )
