"""Finds the transactions in a batch of frames, and checks what pgoutput promises of them.

Transactions come whole, one after the other, in the order of their commit records: so each commits
where its Begin said, and none below a position that was reported as safe before. A stream that
breaks this was damaged on the way: it can't be trusted, and is refused with the LSN.

Elsewhere: the columns of a change (``rows``), the changes that wait (``decoder``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc_assets.flusher.decode import rows as staged_rows
from cdc_assets.flusher.decode.changes import Changes
from cdc_assets.flusher.decode.json_text import parts_of
from cdc_assets.flusher.decode.ranges import ranges
from cdc_assets.postgres import pgoutput
from cdc_assets.postgres.pgoutput import (
    BEGIN,
    COMMIT,
    DELETE,
    INSERT,
    KEEPALIVE,
    MESSAGE,
    ORIGIN,
    RELATION,
    TRUNCATE,
    TYPE,
    UPDATE,
    XLOG_HEADER_BYTES,
    Ints,
    Mask,
    Scan,
)

# Offsets of fields in a frame, after the XLogData header and the kind of the message.
_BODY = XLOG_HEADER_BYTES + 1
_CHANGE = _BODY + 4  # behind the relation's oid
_ORIGIN_NAME = _BODY + 8  # behind the commit's LSN at the origin
# In the XLogData header: the LSN of the record that a frame comes from, of a Commit the LSN of its
# end. In a keepalive: the end of the WAL.
_LSN = 1


@dataclass(frozen=True, slots=True)
class Transaction:
    """An open transaction as in its Begin: commit record's LSN, microseconds since 2000, xid."""

    commit_lsn: int
    commit_time: int
    xid: int


@dataclass(frozen=True, slots=True)
class Batch:
    """A scanned batch with its transactions found.

    ``changes``: frames that are I, U or D; ``events``: those that are R or T. ``transaction``: the
    number of each frame's transaction, where 0 is the one that was open before the batch.
    ``commit_end`` and ``last_commit_time``: of the last commit, 0 without one. ``position``: all
    transactions still to come commit from there on.
    """

    scan: Scan
    changes: Ints
    change_oid: Ints
    events: Ints
    commits: Ints
    transaction: Ints
    commit_lsn: Ints
    commit_time: Ints
    xid: Ints
    commit_end: int
    last_commit_time: int
    position: int
    left_open: Transaction | None

    @classmethod
    def read(cls, scan: Scan, opened: Transaction | None, position: int) -> Batch:
        """``position``: of the batch before. Raises ReplicationProblem if the stream is broken."""
        begins, commits = scan.of(BEGIN), scan.of(COMMIT)
        borders = scan.of(BEGIN, COMMIT)
        expected = np.resize([BEGIN, COMMIT] if opened is None else [COMMIT, BEGIN], len(borders))
        _check(scan, borders, scan.kind[borders] == expected, "a transaction inside another")
        before = opened or Transaction(0, 0, 0)
        commit_lsn = np.concatenate(([before.commit_lsn], scan.lsn(begins, _BODY)))
        commit_time = np.concatenate(([before.commit_time], scan.time(begins, _BODY + 8)))
        xid = np.concatenate(([before.xid], scan.uint32(begins, _BODY + 16)))
        transaction = np.cumsum(scan.kind == BEGIN)
        inside = transaction + (opened is not None) > np.cumsum(scan.kind == COMMIT)
        ends, times = scan.lsn(commits, _BODY + 9), scan.time(commits, _BODY + 17)
        as_begun = (
            (scan.buffer[scan.start[commits] + _BODY] == 0)
            & (scan.lsn(commits, _BODY + 1) == commit_lsn[transaction[commits]])
            & (times == commit_time[transaction[commits]])
            & (ends >= commit_lsn[transaction[commits]])
            & (ends == scan.lsn(commits, _LSN))
        )
        _check(scan, commits, as_begun, "a Commit that isn't its transaction's")
        keepalives = scan.of(KEEPALIVE)
        idle = ~inside[keepalives]
        # The position that is safe after each frame.
        safe = np.zeros(len(scan.kind), np.int64)
        safe[commits] = ends
        safe[keepalives] = np.where(idle, scan.lsn(keepalives, _LSN), 0)
        safe = np.maximum.accumulate(np.maximum(safe, position))
        _check(scan, begins, commit_lsn[1:] >= safe[begins], "a transaction that came before")
        changes = scan.of(INSERT, UPDATE, DELETE)
        events = scan.of(RELATION, TRUNCATE)
        origins, rest = scan.of(ORIGIN), scan.of(TYPE, MESSAGE)
        within = scan.of(INSERT, UPDATE, DELETE, TRUNCATE, RELATION, ORIGIN, TYPE)
        _check(scan, within, inside[within], "a change outside of a transaction")
        recorded = scan.of(INSERT, UPDATE, DELETE, TRUNCATE)
        in_time = scan.lsn(recorded, _LSN) <= commit_lsn[transaction[recorded]]
        _check(scan, recorded, in_time, "a change behind its transaction's commit")
        # A source that is itself a subscriber sends an Origin for each transaction it applied.
        named = ranges(scan.buffer, scan.start[origins] + _ORIGIN_NAME, scan.stop[origins])
        ends_once = pc.find_substring(named, b"\0").to_numpy() == (
            scan.stop[origins] - scan.start[origins] - _ORIGIN_NAME - 1
        )
        _check(scan, origins, ends_once, "a message of kind 'O' that is no origin")
        for frame in rest.tolist():
            pgoutput.check_bystander(scan.message(frame), scan.frame_lsn(frame))
        is_open = len(begins) + (opened is not None) > len(commits)
        left = Transaction(int(commit_lsn[-1]), int(commit_time[-1]), int(xid[-1]))
        return cls(
            scan=scan,
            changes=changes,
            change_oid=scan.uint32(changes, _BODY),
            events=events,
            commits=commits,
            transaction=transaction,
            commit_lsn=commit_lsn,
            commit_time=commit_time,
            xid=xid,
            commit_end=int(ends[-1]) if len(ends) else 0,
            last_commit_time=int(times[-1]) if len(times) else 0,
            position=int(safe[-1]),
            left_open=left if is_open else None,
        )

    def copied(self, frames: Ints, oids: Ints) -> Changes:
        """A copy of the changes in these frames, which are in order, of these relations."""
        messages = ranges(
            self.scan.buffer, self.scan.start[frames] + _CHANGE, self.scan.stop[frames]
        )
        offsets, data = parts_of(messages)
        transaction = self.transaction[frames]
        about = (
            oids,
            self.scan.int64(frames, _LSN),
            self.commit_lsn[transaction],
            self.commit_time[transaction],
            self.xid[transaction],
        )
        return Changes(data[: offsets[-1]], offsets[1:], self.scan.kind[frames], np.stack(about))

    def truncate(self, frame: int) -> pa.Table:
        """The row of a Truncate message."""
        transaction = int(self.transaction[frame])
        return staged_rows.truncated(
            int(self.scan.int64(np.array([frame]), _LSN)[0]),
            int(self.commit_lsn[transaction]),
            int(self.commit_time[transaction]),
            int(self.xid[transaction]),
        )


def _check(scan: Scan, frames: Ints, fits: Mask, otherwise: str) -> None:
    """Raise ReplicationProblem with the LSN of the first of ``frames`` that doesn't fit."""
    if not bool(fits.all()):
        raise pgoutput.broken(otherwise, scan.frame_lsn(int(frames[np.argmin(fits)])))
