"""What a program that follows a consumer group is given: events, each of one table.

The events of a table come in the order of its log, those of several tables in no order. Rows are
``pyarrow.Table``s: the table's columns as the lake has them (names, types, masks), and behind them
the columns of ROW_COLUMNS. A column of the source that has such a name has ``__source`` appended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import pyarrow as pa

from cdc_assets.postgres.lsn import Lsn

ROW_COLUMNS: Mapping[str, pa.DataType] = MappingProxyType(
    {
        "_op": pa.string(),
        "_unchanged": pa.list_(pa.string()),
        "_old_key": pa.bool_(),
        "_offset": pa.int64(),
        "_commit_lsn": pa.int64(),
        "_lsn": pa.int64(),
        "_ts": pa.timestamp("us", "UTC"),
        "_xid": pa.int64(),
    }
)
"""What a row says of itself; ``_old_key`` has the fields of the table's key, see :func:`schema`.

``_op``: I(nserted), U(pdated) or D(eleted), where only the key has values; R(ead) in a snapshot,
where nothing else is said. ``_unchanged``: columns that an update left out, as Postgres does with
large values that it doesn't change: the row has them already, and here they are null. ``_old_key``:
the key that an updated row had before, null if it has it still. ``_offset``: in the table's log.
The rest is of the change and of its transaction.
"""


@dataclass(frozen=True, slots=True)
class Event:
    """``table`` as SQL spells it. ``token``: where the reader of the event is then, see ``since``.

    A token is an opaque text. A program that keeps it together with the data that it writes (in one
    transaction, one token a table) and gives it back to ``follow(…, token=…)`` applies each change
    exactly once. ``since``: the token of the event before, for those that write
    ``… where token = since`` lest two processes write at once.
    """

    table: str
    token: str
    since: str
    _commit: Callable[[], None] = field(repr=False, compare=False)

    def commit(self) -> None:
        """Have the group past this event, and those of the table before it, for ever.

        Raises Fenced if another process has taken the table over; its events are that one's then.
        Within a snapshot it does nothing: only the whole of it counts.
        """
        self._commit()


@dataclass(frozen=True, slots=True)
class Begin(Event):
    """The table begins: what the program has of it doesn't count any more.

    ``why``: the group is new, or the table was copied anew, or the program wanted it.
    ``snapshot``: whether rows and an end of it follow (``start: snapshot``); if not, changes
    from ``lsn`` on. ``schema``: of the rows to come; ``key``: the names of the key's columns, none
    if the table has no key.
    """

    why: str
    snapshot: bool
    lsn: Lsn
    schema: pa.Schema
    key: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SnapshotRows(Event):
    """Some rows of the snapshot, in no order."""

    rows: pa.Table


@dataclass(frozen=True, slots=True)
class SnapshotEnd(Event):
    """The rows since ``Begin`` are all that the table had when ``lsn`` was committed."""

    lsn: Lsn


@dataclass(frozen=True, slots=True)
class Schema(Event):
    """The columns of the changes that follow; also when a process goes on where one ended.

    So it says what the columns are, not what is new: compare it with what you have. Values of an
    added column in rows that were there before aren't changes; ``Stream.begin_again`` gets them.
    """

    schema: pa.Schema
    key: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Changes(Event):
    """Changes in commit order; a large transaction may be in several. ``lsn``: of the last one."""

    rows: pa.Table
    lsn: Lsn


@dataclass(frozen=True, slots=True)
class Truncate(Event):
    """The table was emptied by the transaction that committed at ``lsn``."""

    lsn: Lsn
