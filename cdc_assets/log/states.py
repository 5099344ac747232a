"""The states of a table: who sets each, what is durable then, and what may follow.

SQL has them as text. The functions named here are the only ones that set them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class TableState(StrEnum):
    """How far a table's present epoch (one copy of it) is."""

    WAITING = "waiting"
    """For a pin. It is registered (``TableRegistry.add_table``), or paused before it could be; its
    copy was given up for a new epoch (``restart_copy``, ``LogStore.begin_anew``); or its pin was
    lost, and its landed chunks stay (``await_another_pin``)."""

    COPYING = "copying"
    """Its pin and the plan of its chunks are recorded (``plan_copy``); chunks land one by one."""

    STREAMING = "streaming"
    """Every chunk is in the lake table (``TableRegistry.finish_copy``), or there is nothing to copy
    (``plan_copy``): its log is applied."""

    COPIED = "copied"
    """Like STREAMING in mode snapshot_only: it has no log."""

    PARKED = "parked"
    """It can't go on, and its row has the reason (``park``, ``park_log``, ``park_unknown``; a
    table's former name: ``add_table``; one that is given up: ``let_go``). Lake table and log
    stay as they are."""


# No copy is under way, or may be resumed; and: a log is kept since the pin, without a gap.
SETTLED = frozenset({TableState.STREAMING, TableState.COPIED})
LOGGED = frozenset({TableState.WAITING, TableState.COPYING, TableState.STREAMING})

_S = TableState
FOLLOWING: Mapping[TableState | None, frozenset[TableState]] = {
    None: frozenset({_S.WAITING, _S.PARKED}),
    _S.WAITING: frozenset({_S.COPYING, _S.STREAMING, _S.COPIED, _S.PARKED}),
    _S.COPYING: frozenset({_S.WAITING, _S.STREAMING, _S.COPIED, _S.PARKED}),
    _S.STREAMING: frozenset({_S.WAITING, _S.PARKED}),
    _S.COPIED: frozenset({_S.WAITING, _S.PARKED}),
    _S.PARKED: frozenset({_S.WAITING}),
}
"""The states that may follow each; None: the table isn't registered."""
