"""A draft that is a table of its own, in a catalog that no reader looks at.

It begins with the lake table's metadata, and its files lie among the lake table's. A writer's
commits change it alone. To publish is to add its snapshots to the lake table: one commit of the
lake's catalog, whatever the change took.

The next writer removes the entries of drafts that dead writers left, and a commit to a draft
without an entry fails. What a dead writer wrote is named nowhere then: files of that kind are
orphans, which maintenance removes (``maintenance.expire``).
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from weakref import WeakSet

from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.table import Table
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from sqlalchemy.exc import ProgrammingError, SQLAlchemyError

from cdc_assets.errors import CdcError, Fenced, first_line
from cdc_assets.lake import place as lake_place
from cdc_assets.lake.catalog.catalog import open_catalog, reached
from cdc_assets.lake.catalog.commits import Found, Metadata, delete, edited, folder, newest, read
from cdc_assets.lake.catalog.drafts import DRAFTS, Drafts, drafts_of
from cdc_assets.lake.drafts.branches import drop_all, fenced
from cdc_assets.lake.drafts.metadata import added, drafted, graft, is_draft_of, main_of
from cdc_assets.lake.spark.session import lost_server
from cdc_assets.lake.spark.sql import ticked
from cdc_assets.lake.tables import LakeTable

logger = logging.getLogger(__name__)

# By table, the sessions that opened a draft of it; asked where the lake's catalog is another.
_opened = dict[str, WeakSet[SparkSession]]()
# The tables whose drafts are branches, and until when (time.monotonic()): the next one, where
# somebody else adds snapshots beside ``main``; for longer where a draft couldn't be opened by Spark
# or be published.
_branches_until, _branches_lock = dict[str, float](), threading.Lock()
_BRANCH_SECONDS = 3_600.0


@dataclass(frozen=True, slots=True)
class TableDraft:
    """A draft of the lake table ``loaded``, whose current snapshot was ``base``.

    ``found``: the table's metadata then. ``name``: the draft's in ``drafts``; ``first``: the place
    of its first metadata.
    """

    lake: LakeTable
    loaded: Table
    base: int
    drafts: Drafts
    found: Found
    name: str
    first: str

    @property
    def table(self) -> str:
        """The lake table's UUID, which is the draft's namespace."""
        return str(self.loaded.metadata.table_uuid)

    @property
    def sql_name(self) -> str:
        """For Spark SQL."""
        return f"{DRAFTS}.{ticked(self.table)}.{ticked(self.name)}"

    @property
    def catalog(self) -> str:
        """The catalog whose procedures take :attr:`arguments`."""
        return DRAFTS

    @property
    def arguments(self) -> str:
        """The arguments of Iceberg's procedures that name the draft."""
        return f"table => '{self.sql_name}'"

    def summary(self) -> Mapping[str, str]:
        """The summary of the newest snapshot. Raises Fenced."""
        _, metadata = self._newest()
        head = main_of(metadata)
        [found] = [s["summary"] for s in metadata["snapshots"] if s["snapshot-id"] == head]
        summary: Mapping[str, str] = found
        return summary

    def publish(self) -> None:
        """Add the snapshots to the lake table, if it is as it was. Raises Fenced if it isn't."""
        at, draft = self._newest()
        snapshots = added(draft, self.base)
        if not snapshots:
            raise fenced(self.lake)
        head = int(snapshots[-1]["snapshot-id"])

        def edit(metadata: Metadata) -> bool:
            main = main_of(metadata)
            if main != self.base:
                if any(s["snapshot-id"] == head for s in metadata["snapshots"]):
                    return False  # it is done, and the answer was lost; others may have gone on
                raise fenced(self.lake)
            if not is_draft_of(draft, metadata, snapshots):
                _take_branches(self.table, for_seconds=0)
                raise Fenced(
                    f"{self.lake.row.table}: somebody else's commit to its lake table came between;"
                    " nothing was published."
                )
            drop_all(metadata)
            graft(metadata, draft, snapshots)
            return True

        with reached():
            if not edited(open_catalog(self.lake.config), self.loaded, edit, self.found):
                _take_branches(self.table, for_seconds=_BRANCH_SECONDS)
                raise Fenced(
                    f"{self.lake.row.table}: its lake table couldn't be written, or others wrote it"
                    " again and again; nothing was published."
                )
        with suppress(Exception):  # it is published, and is all that counts
            self._remove(at, draft)

    def give_up(self) -> None:
        """Remove the entry and the metadata; what else was written stays.

        Spark is asked anew whether it can open the next one.
        """
        _opened.pop(self.table, None)
        with suppress(Exception):  # the next writer removes the entry, and files are orphans
            self._remove(*self._newest())

    def _remove(self, at: str, metadata: Metadata) -> None:
        self.drafts.remove(self.table, self.name)
        log = [entry["metadata-file"] for entry in metadata.get("metadata-log", [])]
        delete(self.found.io, {at, self.first, *log}, folder(self.first))

    def _newest(self) -> tuple[str, Metadata]:
        """The newest metadata, and its place. Raises Fenced if another writer has taken it away.

        Who may write in the catalog can lead a draft anywhere: it is believed in its place alone.
        """
        try:
            with reached():
                at = self.drafts.led_to(self.table, self.name)
        except NoSuchTableError as error:
            raise fenced(self.lake) from error
        metadata = read(self.found.io, at) if folder(at) == folder(self.first) else {}
        expected = (self.table, self.found.metadata["location"])
        if (metadata.get("table-uuid"), metadata.get("location")) != expected:
            raise lake_place.misled(self.lake, f"the metadata of a draft is {at}")
        return at, metadata


def table_draft(
    session: SparkSession, lake: LakeTable, base: int, loaded: Table
) -> TableDraft | None:
    """A draft of the snapshot ``base``; None where a branch has to do.

    Removes the entries of dead writers' drafts. Raises Fenced if ``base`` isn't the current one.
    """
    if _takes_branches(str(loaded.metadata.table_uuid)):
        return None
    drafts = _drafts(lake)
    with reached():
        found = newest(open_catalog(lake.config), loaded) if drafts is not None else None
        if drafts is None or found is None:
            return None
        if main_of(found.metadata) != base:
            raise fenced(lake)
        draft = _begun(lake, loaded, base, drafts, found)
    return draft if draft is not None and _is_opened(session, lake, draft) else None


def _take_branches(table: str, *, for_seconds: float) -> None:
    """Have the next drafts of a table be branches; at least one."""
    with _branches_lock:
        _branches_until[table] = time.monotonic() + for_seconds


def _takes_branches(table: str) -> bool:
    with _branches_lock:
        until = _branches_until.get(table)
        if until is not None and time.monotonic() >= until:
            del _branches_until[table]
    return until is not None


def _begun(
    lake: LakeTable, loaded: Table, base: int, drafts: Drafts, found: Found
) -> TableDraft | None:
    first = found.written(drafted(found.metadata))
    if first is None:
        return None
    draft = TableDraft(lake, loaded, base, drafts, found, uuid.uuid4().hex, first)
    try:
        drafts.add(draft.table, draft.name, first)
    except SQLAlchemyError as error:
        delete(found.io, [first], folder(first))
        if _is_the_lakes(lake):
            raise
        logger.info("nothing can be written in the catalog of drafts: %s", first_line(error))
        return None
    return draft


def _drafts(lake: LakeTable) -> Drafts | None:
    """The catalog of drafts. Raises EnvironmentProblem where it is the lake's own, and is away."""
    try:
        return drafts_of(lake.config)
    except (CdcError, SQLAlchemyError) as error:
        if _is_the_lakes(lake):
            raise
        logger.info("there is no catalog of drafts: %s", first_line(error))
        return None


def forget_drafts(lake: LakeTable, loaded: Table) -> None:
    """Remove the entries of a table's drafts: none of them is published then.

    Where nothing may be written there, beside another catalog, no draft was begun (``_begun``).
    """
    if (drafts := _drafts(lake)) is None:
        return
    try:
        with reached():
            drafts.remove(str(loaded.metadata.table_uuid))
    except ProgrammingError as error:
        if _is_the_lakes(lake):
            raise
        logger.info("nothing can be removed in the catalog of drafts: %s", first_line(error))


def _is_the_lakes(lake: LakeTable) -> bool:
    """Whether the drafts' catalog is in the database of the lake's own: no branch helps then."""
    return lake.config.lake.catalog.type == "sql"


def _is_opened(session: SparkSession, lake: LakeTable, draft: TableDraft) -> bool:
    """Whether Spark can open the draft, which is given up if not.

    Asked once a session and table, where that isn't sure, and after a draft that wasn't published.
    Raises PySparkException if Spark itself is away.
    """
    if _is_the_lakes(lake) or session in _opened.get(draft.table, ()):
        return True
    try:
        _ = session.table(draft.sql_name).schema
    except PySparkException as error:
        draft.give_up()
        if lost_server(error):
            raise
        logger.info("Spark can't open a draft of %s: %s", lake.row.table, first_line(error))
        _take_branches(draft.table, for_seconds=_BRANCH_SECONDS)
        return False
    _opened.setdefault(draft.table, WeakSet()).add(session)
    return True
