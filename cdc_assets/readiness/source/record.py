"""Values: the log's record of its source, the source's present state, a comparison's findings."""

from __future__ import annotations

from dataclasses import dataclass

from cdc_assets.errors import SourceMismatch
from cdc_assets.log.table_row import TableRow
from cdc_assets.messages.findings import Finding
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.publication.shape import PublishedShape
from cdc_assets.postgres.slots import SlotStatus
from cdc_assets.postgres.timelines import History

ANEW = "cdc-assets resync --all copies every table anew through a new slot."
# Errors that a new slot and new copies don't mend: of the configuration, or of a foreign slot.
_NOT_HEALED = frozenset(
    {"in_recovery", "standby_behind_log", "slot_plugin", "slot_database", "slot_synced"}
)
# Errors that pass by themselves, as a standby is promoted, or replays what it had before a restart.
PASSING = frozenset({"in_recovery", "standby_behind_log"})


@dataclass(frozen=True, slots=True)
class SlotRestart:
    """The slot's restart LSN, with the server's timeline at that moment.

    A server never goes back behind it. A promoted standby may: it has the slot as it was when last
    synchronized.
    """

    lsn: Lsn
    timeline: int

    def __str__(self) -> str:
        return f"{self.lsn} {self.timeline}"

    @classmethod
    def parse(cls, text: str) -> SlotRestart | None:
        """None for a record of an earlier version, which has no timeline."""
        lsn, _, timeline = text.partition(" ")
        return cls(Lsn.parse(lsn), int(timeline)) if timeline else None


@dataclass(frozen=True, slots=True)
class Recorded:
    """The coordination database's record of the source; None where there is none yet.

    ``read``: what copies have seen had committed below.
    """

    flushed: Lsn | None
    system: str | None = None
    timeline: int | None = None
    database: str | None = None
    publication: str | None = None
    slot_restart: SlotRestart | None = None
    read: Lsn | None = None
    history: History | None = None
    """Of its timeline, if that is known."""


@dataclass(frozen=True, slots=True)
class Source:
    """The source's present state. ``left_at``: where its timeline and the recorded one part, if so.

    ``database`` and ``publication`` are oids: a new object of the same name has another one.
    """

    in_recovery: bool
    system: str
    timeline: int
    end: Lsn
    database: str
    database_name: str
    publication: str | None
    slot: SlotStatus | None
    left_at: Lsn | None = None
    sent: Lsn | None = None
    """How far its slot's stream was sent, as known after ``left_at``; None if that isn't known."""
    received: Lsn = Lsn.ZERO
    """Of a standby: how much WAL it has; ``end`` is how much of it is replayed."""
    history: History | None = None
    """Of its timeline, if it was asked for."""

    @property
    def went_on(self) -> bool:
        """Whether the slot's stream went on here from the recorded timeline to the present one."""
        return self.left_at is not None and self.sent is not None and self.sent > self.left_at


@dataclass(frozen=True, slots=True)
class PublishedAs:
    """A table's entry in a publication, that publication with its visible settings, its version.

    ``entry`` has an oid: a new entry for the same table has another one. ``version`` is the
    transaction that altered the publication last: it reveals an alteration that was undone.
    """

    entry: str
    publication: str = ""
    version: str = ""

    def __str__(self) -> str:
        return f"{self.entry}/{self.publication}/{self.version}"

    @classmethod
    def parse(cls, text: str) -> PublishedAs:
        """Also reads a record of an earlier version, which has the entry alone."""
        return cls(*text.split("/"))

    def was_put_back(self, now: PublishedAs) -> bool:
        """Whether the publication was altered, and then put back as it was."""
        return (
            self.version != ""
            and self.publication == now.publication
            and self.version != now.version
        )


@dataclass(frozen=True, slots=True)
class TableNow:
    """A followed table as the source has it now.

    ``oid``: of the table of that name; ``name_of_oid``: the present name of the recorded oid.
    ``unlogged``: the name of the table or its partition that isn't in the WAL. ``sent_as``: the
    partition root as which its changes are sent.
    """

    oid: int | None
    kind: str
    unlogged: str | None
    sent_as: str | None
    name_of_oid: str | None
    published: bool
    published_as: PublishedAs | None
    shape: PublishedShape
    row_filter: str | None
    """As the server writes it, with the present names of its columns."""
    twice: bool
    """Whether the other publication of the source has it, too: the server sends what either has."""

    @property
    def was_dropped(self) -> bool:
        return self.oid is None and self.name_of_oid is None


@dataclass(frozen=True, slots=True)
class Review:
    """All findings, the source's first."""

    source: tuple[Finding, ...]
    tables: tuple[tuple[TableRow, Finding], ...] = ()
    published_as: tuple[tuple[TableRow, PublishedAs], ...] = ()
    """Entries of tables without an error that differ from the recorded ones."""
    row_filters: tuple[tuple[TableRow, str | None], ...] = ()
    """Filters of such tables that are written otherwise than recorded: columns were renamed."""

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.source if finding.severity == "error"]

    @property
    def passes(self) -> bool:
        """Whether it is to be looked at again, as nothing of now can be told."""
        return any(finding.code in PASSING for finding in self.errors)

    @property
    def healed_by_copies(self) -> bool:
        """Whether a new slot and new copies of all tables are a way out."""
        return not any(finding.code in _NOT_HEALED for finding in self.errors)

    def refuse(self) -> None:
        """Raise SourceMismatch naming every error of the source, if there is one."""
        found = self.errors
        if found:
            raise SourceMismatch(
                [finding.code for finding in found],
                "; ".join(f"{f.code}: {f.message.rstrip('.')}" for f in found) + ".",
                " ".join(dict.fromkeys(f.remedy for f in found)),
            )
