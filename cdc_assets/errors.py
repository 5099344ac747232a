"""Every error this package raises on purpose.

A message says what is wrong, where, and what to do next. An error that a person can act on derives
from :class:`CdcError`; anything else that escapes is a defect. No secret is ever part of a message,
and no value of a row: :func:`first_line` makes a foreign error's words fit for one.
"""

from __future__ import annotations

from collections.abc import Sequence

from cdc_assets.messages.foreign_words import said
from cdc_assets.messages.texts import DESCRIPTION, bounded


class CdcError(Exception):
    """Base of all expected errors: ``what`` is wrong and the ``remedy`` a person can apply."""

    def __init__(self, what: str, remedy: str = "") -> None:
        self.what = what
        self.remedy = remedy
        super().__init__(f"{_ended(what)} {remedy}" if remedy else what)


class ConfigurationError(CdcError):
    """The configuration can't be used: a bad key, value, environment variable or table name."""


class EnvironmentProblem(CdcError):
    """This machine lacks something: Java, a free port, a supported Python, a readable directory."""


class PreflightError(CdcError):
    """The source database isn't ready for logical replication."""


class NotReady(CdcError):
    """A process refuses to begin; ``codes`` and the message name all errors as ``check`` does."""

    def __init__(self, codes: Sequence[str], what: str, remedy: str = "") -> None:
        self.codes = tuple(codes)
        super().__init__(what, remedy)


class ReplicationProblem(CdcError):
    """The replication stream can't go on without a person or a restart."""


class ReplicationLost(ReplicationProblem):
    """A replication connection was lost, or can't be opened now: another try may succeed."""


class SourceMismatch(ReplicationProblem):
    """The source isn't what the log was made from, or has moved on without it.

    ``codes`` name each mismatch as ``check`` does; all of them are in the message.
    """

    def __init__(self, codes: Sequence[str], what: str, remedy: str = "") -> None:
        self.codes = tuple(codes)
        super().__init__(what, remedy)


class SlotBusy(ReplicationProblem):
    """Slot creation waits for transactions that don't end."""


class StagingProblem(CdcError):
    """The staging place can't be written, and waiting won't help: somebody has to correct it."""


class StagedFileChanged(CdcError):
    """A staged file's bytes aren't those that the flusher wrote; nothing of it is applied."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"the staged file {path} isn't what the flusher wrote: somebody changed it.",
            "Put it back from a backup; else copy its tables anew: cdc-assets resync.",
        )


class CoordinationError(CdcError):
    """The coordination schema is missing, newer than this program, or unusable through a pooler."""


class TableProblem(CdcError):
    """One table can't go on; the others do. Carries the table so that it can be parked by name."""

    def __init__(self, table: object, what: str, remedy: str = "") -> None:
        self.table = table
        # It may be of a problem that was told before, and has its name already.
        super().__init__(f"{table}: {what.removeprefix(f'{table}: ')}", remedy)

    @property
    def reason(self) -> str:
        """What it says, and the way out, where the table's name stands beside it."""
        return str(self).removeprefix(f"{self.table}: ")

    @classmethod
    def of(cls, table: object, error: CdcError) -> TableProblem:
        """``error`` as the table's, unless it is one already."""
        return error if isinstance(error, cls) else cls(table, error.what, error.remedy)


class TablePaused(TableProblem):
    """Somebody paused the table, or its source: its log waits."""

    def __init__(self, table: object, since: object) -> None:
        super().__init__(
            table, f"it is paused since {since}", "End that with cdc-assets resume, or its job."
        )


class ConditionProblem(TableProblem):
    """A condition on rows of the table (``where``) isn't one, or none that we run."""


class TablesFailed(CdcError):
    """Some tables failed while the others went on; raised at the end of the work."""

    def __init__(self, problems: Sequence[TableProblem]) -> None:
        self.problems = tuple(problems)
        told = [str(problem) for problem in problems]
        # In one line: whoever shows an error briefly shows its first one.
        super().__init__("; ".join([*(said.rstrip(".;") for said in told[:-1]), *told[-1:]]))


class SnapshotLost(CdcError):
    """The exported snapshot is gone because the connection that exported it is."""


class CopyRestarted(CdcError):
    """A table's copy so far is of no use any more: a new epoch of it waits for a pin."""


class SparkProblem(CdcError):
    """The Spark Connect server can't be started or reached."""


class FollowerProblem(CdcError):
    """The follower, the long-lived process that merges, ended by itself."""


class Fenced(CdcError):
    """Another worker took over what this one was doing; it must not commit."""


def _ended(what: str) -> str:
    """``what`` with a full stop, unless it ends with a mark already."""
    return what if what.endswith((".", "?", "!", ":", ";")) else f"{what}."


def first_line(error: BaseException) -> str:
    """The sentence of an error that a person needs; of a foreign one, without any value."""
    if isinstance(error, CdcError):  # of our own words
        return bounded((str(error).strip() or type(error).__name__).splitlines()[0], DESCRIPTION)
    return said(error)
