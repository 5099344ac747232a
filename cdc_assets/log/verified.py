"""Progress of the checks and the care of lake tables: what was compared or cared for, and when.

The rows of ``verified_samples`` and ``checked_keys``, and facts of ``pipeline_meta``; ``verify``
does the comparing. A table at rest is one of which nothing changed since: to look at it again
would find what was found.

That is told by a table's version, which is read before the look: it is another one after each
change. Versions are compared for equality. A time of a look would order it with changes by a clock
that may be set back, and by when a change's transaction began, not by when it committed.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import LiteralString

from cdc_assets.log.store import LogStore
from cdc_assets.log.tables import GROUP
from cdc_assets.postgres.names import TableId

_CARED = "maintenance.cared:"
# Another one whenever a table's copy or state changed, or a merge changed its rows.
_VERSIONS: LiteralString = (
    "from tables t left join mat_cursor m on m.consumer_group = %(group)s"
    " and m.source = t.source and m.table_name = t.table_name"
    " cross join lateral (select concat_ws('/', t.epoch, extract(epoch from t.updated_at),"
    ' m."offset", extract(epoch from m.updated_at)) as version) now'
)


@dataclass(frozen=True, slots=True)
class Compared:
    """Progress of a table's sampled comparison.

    ``next_share``: where the next part begins, from 0 to 1. ``round_ended``: when the last part of
    a whole round was compared. ``differed_at``: when rows of the copy ``differed_epoch`` differed,
    until all of it was found equal since.
    """

    next_share: float = 0.0
    round_ended: datetime | None = None
    differed_at: datetime | None = None
    differed_epoch: int | None = None


def version(store: LogStore, table: TableId) -> str:
    """The table's version, for what is about to look at it; empty of a table without a row."""
    row = store.connection.execute(
        f"select now.version {_VERSIONS} where t.source = %(source)s and t.table_name = %(table)s",
        {"source": store.source, "group": GROUP, "table": str(table)},
    ).fetchone()
    return str(row[0]) if row else ""


def note_written(store: LogStore, table: TableId) -> None:
    """Give a new version to a table that was written to without a merge."""
    store.connection.execute(
        "update tables set updated_at = now() where source = %s and table_name = %s",
        (store.source, str(table)),
    )


def compared(store: LogStore, table: TableId) -> Compared:
    row = store.connection.execute(
        "select next_share, round_ended, differed_at, differed_epoch"
        " from verified_samples where source = %s and table_name = %s",
        (store.source, str(table)),
    ).fetchone()
    return Compared(*row) if row else Compared()


def remember_compared(
    store: LogStore,
    table: TableId,
    next_share: float | None = None,
    *,
    saw: str | None = None,
    differs: int | None = None,
) -> None:
    """Record that a part was compared; the next one begins at ``next_share``, 0 ends a round.

    ``saw``: the table's version before a round's first part was compared; not of another part.
    None: the whole table was compared, beside the rounds. ``differs``: the copy whose rows differ,
    if any do. A difference is over once the whole table, or a round begun later, was compared.
    """
    store.connection.execute(
        "insert into verified_samples as v"
        " (source, table_name, next_share, compared_at, round_saw, round_ended, differed_at,"
        "  differed_epoch)"
        " values (%(source)s, %(table)s, coalesce(%(share)s::float8, 0), now(),"
        "  %(saw)s::text,"
        "  case when %(share)s::float8 = 0 then now() end,"
        "  case when %(differs)s::int is not null then now() end, %(differs)s::int)"
        " on conflict (source, table_name) do update set"
        " next_share = coalesce(%(share)s::float8, v.next_share), compared_at = now(),"
        " missed_since = null, round_saw = coalesce(excluded.round_saw, v.round_saw),"
        " round_ended = coalesce(excluded.round_ended, v.round_ended),"
        " differed_at = case when excluded.differed_at is not null then excluded.differed_at"
        "  when %(share)s::float8 is null then null"
        "  when %(share)s::float8 = 0 and v.differed_at <= v.round_ended then null"
        "  else v.differed_at end,"
        " differed_epoch = coalesce(excluded.differed_epoch, v.differed_epoch)",
        {
            "source": store.source,
            "table": str(table),
            "share": next_share,
            "saw": saw,
            "differs": differs,
        },
    )


def remember_missed(store: LogStore, table: TableId) -> datetime:
    """Record that nothing was compared; returns since when that is so."""
    row = store.connection.execute(
        "insert into verified_samples as v (source, table_name, next_share, missed_since)"
        " values (%s, %s, 0, now()) on conflict (source, table_name) do update"
        " set missed_since = coalesce(v.missed_since, v.compared_at, now())"
        " returning missed_since",
        (store.source, str(table)),
    ).fetchone()
    assert row is not None and isinstance(row[0], datetime)
    return row[0]


def compared_at_rest(store: LogStore, rest: timedelta) -> frozenset[TableId]:
    """Tables of which a round ended less than ``rest`` ago, all equal; unchanged since it began.

    A change in its midst, even one of the table's first part, may not have been compared.
    """
    rows = store.connection.execute(
        f"select t.table_name {_VERSIONS}"
        " join verified_samples v on v.source = t.source and v.table_name = t.table_name"
        " where t.source = %(source)s and v.round_saw = now.version"
        " and v.round_ended > now() - %(rest)s"
        " and v.next_share = 0 and v.missed_since is null and v.differed_at is null",
        {"source": store.source, "group": GROUP, "rest": rest},
    ).fetchall()
    return frozenset(TableId.parse(name) for (name,) in rows)


def remember_care(
    store: LogStore, table: TableId, saw: str, until: datetime, settings: str
) -> None:
    """Record that care of the version that it ``saw`` left nothing to do before ``until``.

    Unless the table changes, or the ``settings`` that it was cared for by.
    """
    store.set_meta(f"{_CARED}{table}", f"{saw} {until.isoformat()} {settings}")


def cared_at_rest(store: LogStore) -> dict[TableId, str]:
    """The tables that care has nothing to do for now, and by which settings that is so."""
    rows = store.connection.execute(
        f"select t.table_name, c.value, now.version, now() {_VERSIONS}"
        " join pipeline_meta c on c.source = t.source and c.key = %(cared)s || t.table_name"
        " where t.source = %(source)s",
        {"source": store.source, "group": GROUP, "cared": _CARED},
    ).fetchall()
    found = dict[TableId, str]()
    for name, value, seen, now in rows:  # a cast in SQL may be tried on other keys' values
        saw, until, settings = value.split()
        if saw == seen and datetime.fromisoformat(until) > now:
            found[TableId.parse(name)] = settings
    return found


@dataclass(frozen=True, slots=True)
class KeysSeen:
    """Progress of looking at a lake table's keys.

    ``new`` and ``round`` are places of data files in the order of sequence number and path, in
    which files are looked at: of the new files, and of a round over the others (None: none is under
    way). ``behind``: the number of new files that weren't looked at yet.
    """

    lake_table: str
    snapshot_id: int
    new: tuple[int, str]
    behind: int = 0
    round: tuple[int, str] | None = None
    round_ended: datetime | None = None


def keys_seen(store: LogStore, table: TableId) -> KeysSeen | None:
    row = store.connection.execute(
        "select lake_table::text, snapshot_id, new_sequence, new_path, behind, round_sequence,"
        " round_path, round_ended from checked_keys where source = %s and table_name = %s",
        (store.source, str(table)),
    ).fetchone()
    if row is None:
        return None
    lake_table, snapshot, sequence, path, behind, round_sequence, round_path, ended = row
    at = None if round_sequence is None else (round_sequence, round_path)
    return KeysSeen(lake_table, snapshot, (sequence, path), behind, at, ended)


def keys_unfinished(store: LogStore) -> frozenset[TableId]:
    """The tables of which files wait to be looked at: new ones, or of a round under way."""
    rows = store.connection.execute(
        "select table_name from checked_keys"
        " where source = %s and (behind > 0 or round_sequence is not null)",
        (store.source,),
    ).fetchall()
    return frozenset(TableId.parse(name) for (name,) in rows)


def remember_keys(store: LogStore, table: TableId, seen: KeysSeen) -> None:
    store.connection.execute(
        "insert into checked_keys (source, table_name, lake_table, snapshot_id, new_sequence,"
        " new_path, behind, round_sequence, round_path, round_ended)"
        " values (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s) on conflict (source, table_name)"
        " do update set lake_table = excluded.lake_table, snapshot_id = excluded.snapshot_id,"
        " new_sequence = excluded.new_sequence, new_path = excluded.new_path,"
        " behind = excluded.behind, round_sequence = excluded.round_sequence,"
        " round_path = excluded.round_path, round_ended = excluded.round_ended",
        (
            store.source,
            str(table),
            seen.lake_table,
            seen.snapshot_id,
            *seen.new,
            seen.behind,
            *(seen.round or (None, None)),
            seen.round_ended,
        ),
    )
