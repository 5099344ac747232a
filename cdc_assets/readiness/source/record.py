"""What the log remembers of its source, what the source is now, and what a comparison found."""

from __future__ import annotations

from dataclasses import dataclass

from cdc_assets.errors import SourceMismatch
from cdc_assets.log.tables import TableRow
from cdc_assets.messages.findings import Finding
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.publications import PublishedShape
from cdc_assets.postgres.slots import SlotStatus

ANEW = "cdc-assets resync --all copies every table anew through a new slot."
# What a new slot and new copies don't mend: it is the configuration, or somebody else's slot.
_NOT_HEALED = frozenset({"in_recovery", "slot_plugin", "slot_database"})


@dataclass(frozen=True, slots=True)
class SlotRestart:
    """Where the slot began, on the timeline that the server had then.

    A server never goes back behind it. The standby that takes its place may: it has the slot as it
    was when it last heard of it.
    """

    lsn: Lsn
    timeline: int

    def __str__(self) -> str:
        return f"{self.lsn} {self.timeline}"

    @classmethod
    def parse(cls, text: str) -> SlotRestart | None:
        """None for what an earlier version wrote down, without a timeline."""
        lsn, _, timeline = text.partition(" ")
        return cls(Lsn.parse(lsn), int(timeline)) if timeline else None


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the coordination database remembers; None where nothing was written down yet."""

    flushed: Lsn | None
    system: str | None = None
    timeline: int | None = None
    database: str | None = None
    publication: str | None = None
    slot_restart: SlotRestart | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """What the source is now. ``left_at``: where its timeline left the recorded one, if it did.

    ``database`` and ``publication`` are oids, which another one of the same name doesn't have.
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


@dataclass(frozen=True, slots=True)
class PublishedAs:
    """Which entry a publication has a table by; which publication, with what we see of it; since.

    ``entry`` has an oid, which another entry for the same table doesn't have. ``version`` is the
    transaction that altered the publication last: it tells of what was altered and put back.
    """

    entry: str
    publication: str = ""
    version: str = ""

    def __str__(self) -> str:
        return f"{self.entry}/{self.publication}/{self.version}"

    @classmethod
    def parse(cls, text: str) -> PublishedAs:
        """Also of an earlier version, which wrote down the entry alone."""
        return cls(*text.split("/"))

    def was_put_back(self, now: PublishedAs) -> bool:
        """Whether the publication was altered, and looks as if it hadn't been."""
        return (
            self.version != ""
            and self.publication == now.publication
            and self.version != now.version
        )


@dataclass(frozen=True, slots=True)
class TableNow:
    """A followed table as the source has it now.

    ``oid``: of the table of that name; ``name_of_oid``: what the recorded oid is called now.
    ``unlogged``: it, or a partition of it, that isn't in the WAL. ``sent_as``: the root as whose
    part its changes are sent.
    """

    oid: int | None
    kind: str
    unlogged: str | None
    sent_as: str | None
    name_of_oid: str | None
    published: bool
    published_as: PublishedAs | None
    shape: PublishedShape


@dataclass(frozen=True, slots=True)
class Review:
    """Everything that was found, the source's first."""

    source: tuple[Finding, ...]
    tables: tuple[tuple[TableRow, Finding], ...] = ()
    published_as: tuple[tuple[TableRow, PublishedAs], ...] = ()
    """Of the tables with nothing wrong, where it isn't what was written down."""

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.source if finding.severity == "error"]

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
