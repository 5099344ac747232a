"""How first copies are made, and where they are read."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from cdc_assets.config.base import Dsn, Duration, Section

Strategy = Literal["pinned", "incremental", "auto"]
PinBy = Literal["slot", "lock"]
_LSN = r"^[0-9A-Fa-f]{1,8}/[0-9A-Fa-f]{1,8}$"


class CopyFromConfig(Section):
    """Another server that first copies are read from, so that they are no load for the source."""

    kind: Literal["clone", "replica", "dump"]
    """clone: a physical copy (a base backup, a snapshot of the volume) that was promoted, or whose
    replay is paused. It must end after the tables' logs began, and nobody may write to it.
    replica: a hot standby that goes on. dump: a database that a dump was restored into, which was
    taken under a snapshot of cdc-assets pin --hold; without dsn and lsn, tables wait for it."""
    dsn: Dsn | None = None
    """Its address, of a role that reads the tables."""
    lsn: Annotated[str, Field(pattern=_LSN)] | None = None
    """Of a dump: the LSN that was named together with its snapshot. Others know their own."""
    replication_dsn: Dsn | None = None
    """The same of a role that may replicate, where that one may not: it is asked for timelines."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.kind != "dump" and (self.dsn is None or self.lsn is not None):
            raise ValueError("give dsn, and no lsn: only a dump doesn't know its own")
        if self.kind == "dump" and (self.dsn is None) != (self.lsn is None):
            raise ValueError("give dsn and lsn of a dump; or neither, until there is one")
        return self


class AdoptConfig(Section):
    """A lake table that is there already, and is kept current without a copy; true alone will do.

    Without lsn and mark nothing is applied to it until verify --repair has corrected its rows.
    """

    lsn: Annotated[str, Field(pattern=_LSN)] | None = None
    """The LSN below which it has whatever committed. The table's log has to begin no later."""
    mark: str | None = None
    """A mark of ours (its tag is mark_<name>) that it has the rows of; the tag knows the LSN."""
    wait: bool = False
    """Have its log begin, and wait for lsn or mark: while something else fills the table still."""

    @model_validator(mode="before")
    @classmethod
    def _alone(cls, value: object) -> object:
        return {} if value is True else value

    @model_validator(mode="after")
    def _one_position(self) -> Self:
        if (self.lsn is not None) + (self.mark is not None) + self.wait > 1:
            raise ValueError("give one of lsn, mark and wait")
        return self


class SnapshotConfig(Section):
    """How the first copy is made."""

    mode: Literal["initial", "snapshot_only", "never"] = "initial"
    """initial: copy, then follow. snapshot_only: copy, once. never: follow what is there."""
    strategy: Strategy = "pinned"
    """pinned: all under one snapshot, which a session holds until everything is read: VACUUM keeps
    what was deleted meanwhile. incremental: in many short transactions, whose differences the log
    evens out; for mirrors of tables with a key, from Postgres 14 on, other tables are pinned.
    auto: incremental above 100 GB."""
    hold_at_most: Annotated[Duration, Field(ge=timedelta(seconds=0.1))] = timedelta(seconds=2)
    """About how long a transaction of an incremental copy lasts."""
    pin: PinBy = "slot"
    """What a pin beside the stream is made with. slot: a temporary one, which waits for every
    transaction of the cluster that has written. lock: a moment's SHARE lock of the table, which
    waits for those that write to it alone; who writes to it then waits, too."""
    lock_at_most: Annotated[
        Duration, Field(ge=timedelta(seconds=0.01), le=timedelta(seconds=2))
    ] = timedelta(seconds=0.1)
    """How long a pin by lock may have those wait who write to the table, at most: less than the
    lock_timeout of your applications."""
    max_parallel_tables: Annotated[int, Field(ge=1, le=64)] = 2
    """Runs that copy at once."""
    max_parallel_chunks: Annotated[int, Field(ge=1, le=256)] = 4
    """Chunks that one run copies at once."""
    from_: Annotated[CopyFromConfig | None, Field(alias="from")] = None
    """Where the tables are read, if not at the source."""

    @model_validator(mode="after")
    def _followed(self) -> Self:
        if self.from_ is not None and self.mode != "initial":
            raise ValueError("from: goes with mode: initial, whose log goes on from the copy")
        return self
