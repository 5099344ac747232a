"""The restart record: the log's record of its source, compared with the source's present state.

A log may only be continued from the very source it was made from, through a slot that still has
everything after ``flushed_lsn``. Each violation has a finding of its own: its code stays the same
for ever, and it has a remedy. Findings of the *source* stop all streaming and are reported
together; those of one *table* park that table, the others flow on. Nothing is ever skipped to get
going again: the way out is a copy made anew (``resync``). So a finding that can disappear by itself
(a table taken out of the publication, and added again) leaves a lasting trace (a recorded oid, a
parked table).

Why that is complete: a change is in the log if the slot's position never was ahead of
``flushed_lsn`` (nobody else consumed), if WAL and slot are the ones that the position belongs to
(same cluster, same database, a timeline that doesn't leave ours below it, no older state of
either), and if the publication had the table, whole, all the time. The comparisons below are these
three. They are pure: ``now`` queries the source, ``readiness.admission`` acts on the findings.
"""

from __future__ import annotations

from collections.abc import Iterator

from cdc_assets.config.tables import TableConfig
from cdc_assets.log.table_row import TableRow
from cdc_assets.messages.findings import Finding
from cdc_assets.messages.texts import command
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.publication.contents import publication_of
from cdc_assets.postgres.slots import LOGICAL, SlotStatus
from cdc_assets.readiness.source.partitions import sent_as
from cdc_assets.readiness.source.record import ANEW, PublishedAs, Recorded, Source, TableNow


def compare(
    known: Recorded, now: Source, slot: str, publication: str, *, standby: bool = False
) -> Iterator[Finding]:
    """Findings about the source as a whole; ``standby``: it is meant to be one, or was."""
    if now.in_recovery and not standby:
        yield Finding(
            "in_recovery",
            "error",
            "this server is a standby, and postgres.dsn is to lead to a primary.",
            "Give the primary's address, or all of them with target_session_attrs=read-write; or"
            " stream from the standby: postgres.standby: true.",
        )
        return
    if known.system is not None and known.system != now.system:
        yield Finding(
            "other_cluster",
            "error",
            f"this is another Postgres cluster (system identifier {now.system}) than the one the"
            f" log was made from ({known.system}).",
            f"Correct postgres.dsn; if the data really moved (a dump, an upgrade): {ANEW}",
        )
        return  # nothing else can be compared
    if known.database is not None and known.database != now.database:
        yield Finding(
            "other_database",
            "error",
            f"the database {now.database_name} isn't the one the log was made from: it was dropped"
            " and made again, or postgres.dsn names another one.",
            f"Correct postgres.dsn; if the data really moved: {ANEW}",
        )
    if known.flushed is not None:
        flushed = max(known.flushed, known.read or known.flushed)
        yield from _compare_wal(known, flushed, now, standby=standby)
    yield from compare_slot(known, now.slot, now.database_name, slot)
    yield from _compare_restart(known, now, slot)
    if known.publication is not None and known.publication != now.publication:
        state = "is gone" if now.publication is None else "was dropped and made again"
        yield Finding(
            "publication_gone",
            "error",
            f"the publication {publication} {state}: what was changed meanwhile was not sent.",
            ANEW,
        )


def _compare_wal(known: Recorded, flushed: Lsn, now: Source, *, standby: bool) -> Iterator[Finding]:
    assert known.flushed is not None
    # What is read at a standby is known to be in the WAL that it has, replayed yet or not.
    if now.in_recovery and (now.end < known.flushed or now.received < flushed):
        yield Finding(
            "standby_behind_log",
            "error",
            f"the standby has replayed up to {now.end}, but log or copies have changes up to"
            f" {flushed}: it was restarted, and isn't back there yet, or it is an older copy.",
            "Wait: it goes on by itself. If it stays so, see whether its replay is paused.",
        )
        return  # it may have to follow its primary to the recorded timeline again
    if not now.in_recovery and now.end < flushed:
        yield Finding(
            "source_behind_log",
            "error",
            f"the source's WAL ends at {now.end}, but log or copies have changes up to {flushed}:"
            " a backup was restored, or a standby promoted that lacked the end.",
            f"{ANEW} (What the log has beyond it isn't in the source any more.)",
        )
    if known.timeline is None or (known.timeline == now.timeline and now.left_at is None):
        return
    if standby and now.went_on:
        return  # the stream itself went on to this timeline, at this very server
    if now.left_at is None or now.left_at < flushed:
        parted = now.left_at is not None and now.left_at > Lsn.ZERO
        where = f"parted from it at {now.left_at}" if parted else "has nothing in common with it"
        yield Finding(
            "timeline_diverged",
            "error",
            f"log or copies have changes up to {flushed} of timeline {known.timeline}; the source"
            f" is on a timeline {now.timeline}, which {where}: a backup was restored, or a standby"
            " promoted that lacked the end.",
            ANEW,
        )


def _compare_restart(known: Recorded, now: Source, name: str) -> Iterator[Finding]:
    """Whether the slot went back on its timeline; ``_compare_wal`` judges a change of timeline."""
    before, slot = known.slot_restart, now.slot
    if before is None or slot is None or slot.restart is None or before.timeline != now.timeline:
        return
    if known.flushed is not None and slot.restart < before.lsn:
        yield Finding(
            "slot_behind",
            "error",
            f"the slot {name} begins at {slot.restart}, but began at {before.lsn} before: an older"
            " state of the server was restored, and the log may have changes that it never saw.",
            ANEW,
        )


_FEEDBACK = (
    "On the standby: alter system set hot_standby_feedback = on; and primary_slot_name to a slot of"
    " the primary, which then keeps what the slot needs. "
)
_LEVEL = f"{LOGICAL} then restart it. "
# What is to be done before a new slot is made, by the server's word.
_MENDED = {
    "rows_removed": _FEEDBACK,
    "wal_level_insufficient": _LEVEL,
    "conflict with recovery": _FEEDBACK + _LEVEL,
}


def compare_slot(
    known: Recorded, slot: SlotStatus | None, database: str, name: str
) -> Iterator[Finding]:
    """Findings about the slot, the worst first; a healthy one gives no error."""
    flushed = known.flushed
    if slot is None:
        if flushed is not None:
            yield Finding(
                "slot_gone",
                "error",
                f"the replication slot {name} is gone; the log has the changes up to {flushed},"
                " those after it are missing.",
                f"Find out who dropped it. {ANEW}",
            )
        return
    by_hand = f"select pg_drop_replication_slot('{name}');"
    if slot.plugin != "pgoutput":
        yield Finding(
            "slot_plugin",
            "error",
            f"the slot {name} uses {slot.plugin or 'physical replication'}, not pgoutput.",
            f"Set slot: to another name, or drop it ({by_hand})"
            + (f" Then {ANEW}" if flushed is not None else ""),
        )
        return
    if slot.database != database:
        yield Finding(
            "slot_database",
            "error",
            f"the slot {name} belongs to the database {slot.database}, not to {database}.",
            "Set slot: to another name, or drop it there"
            f" ({by_hand})" + (f" Then {ANEW}" if flushed is not None else ""),
        )
        return
    if slot.synced:
        yield Finding(
            "slot_synced",
            "error",
            f"the slot {name} of this standby is a copy of its primary's, for a failover"
            " (sync_replication_slots): nothing can be streamed from it here.",
            "Set slot: to another name, or, if nobody streams from the primary's any more, drop it"
            f" there ({by_hand})" + (f" Then {ANEW}" if flushed is not None else ""),
        )
        return
    way_out = ANEW if flushed is not None else f"Drop it: {by_hand}"
    if slot.invalidation not in (None, "wal_removed"):
        yield Finding(
            "slot_invalidated",
            "error",
            f"the server invalidated the slot {name} ({slot.invalidation}).",
            f"{_MENDED.get(slot.invalidation or '', '')}{way_out}",
        )
        return
    if slot.wal_status == "lost":
        yield Finding(
            "slot_lost",
            "error",
            f"the slot {name} lost the WAL it needs (max_slot_wal_keep_size).",
            f"Raise max_slot_wal_keep_size. {way_out}",
        )
        return
    if slot.wal_status == "unreserved":
        yield Finding(
            "slot_unreserved",
            "warning",
            f"the slot {name} keeps more WAL than max_slot_wal_keep_size: the server removes it at"
            " the next checkpoint.",
            "Start the flusher, or raise max_slot_wal_keep_size, at once.",
        )
    if slot.two_phase:
        # The server then sends PREPARE instead of rows at COMMIT, even if the stream asks for none.
        yield Finding(
            "slot_two_phase",
            "error",
            f"the slot {name} was made with two_phase: prepared transactions come in a form that"
            " isn't followed.",
            way_out,
        )
    if flushed is None:
        yield Finding(
            "slot_unrecorded",
            "info",
            f"the slot {name} exists, but the coordination database knows of no log: it starts"
            " where the slot stands, and every table is copied.",
            "",
        )
        return
    if slot.confirmed_flush is not None and slot.confirmed_flush > flushed:
        yield Finding(
            "slot_moved",
            "error",
            f"somebody else moved the slot {name} to {slot.confirmed_flush}, or made it anew, but"
            f" the log ends at {flushed}: the changes between them are missing.",
            "Find out who used the slot (or restored the coordination database), and give that"
            f" consumer a slot of its own. {ANEW}",
        )


def compare_table(
    row: TableRow, now: TableNow, publication: str, configured: TableConfig | None
) -> Iterator[Finding]:
    """The finding about one followed table; at most one, the root of the others."""

    def found(code: str, message: str, remedy: str) -> Finding:
        return Finding(code, "error", f"{row.table}: {message}.", remedy)

    resync = command("resync", row.table)
    before = PublishedAs.parse(row.published_as) if row.published_as is not None else None
    name = publication_of(publication, inserts_only=row.inserts_only)
    if now.oid is None:
        if now.was_dropped:
            give_up = f"give it up: {command('drop-table', row.table)}"
            if configured is None:
                way_out = f"It is out of the configuration, so {give_up}"
            elif configured.found:
                way_out = (
                    "Reload the code location, or start the command again: no pattern stands for it"
                    f" then. After that {give_up} -- or create it again, then {resync}"
                )
            else:
                way_out = f"Take it out of the configuration; or create it again, then {resync}"
            yield found("table_dropped", "it was dropped in the source", way_out)
        else:
            yield found(
                "table_renamed",
                f"it is called {now.name_of_oid} now",
                f"Put the new name into the configuration; or rename it back, then {resync}",
            )
    elif now.oid != row.oid:
        yield found(
            "table_recreated",
            f"another table has its name now (oid {now.oid}, it was {row.oid}): it was dropped and"
            " created again, or swapped",
            resync,
        )
    elif now.unlogged is not None:
        yield found(
            "table_unlogged",
            f"{now.unlogged} is unlogged now: its changes aren't in the WAL",
            f"alter table {now.unlogged} set logged; -- then {resync}",
        )
    elif now.sent_as is not None:
        yield found(
            "table_under_root",
            sent_as(now.sent_as),
            f"Take {row.table} out of the configuration; or take {now.sent_as} out of it and of the"
            f" publication, then {resync}",
        )
    elif not now.published:
        yield found(
            "table_unpublished",
            f"somebody took it out of the publication {name}: changes since then are missing",
            resync,
        )
    elif before is not None and now.published_as and before.entry != now.published_as.entry:
        yield found(
            "table_republished",
            f"somebody took it out of the publication {name} and added it again: changes"
            " between are missing",
            resync,
        )
    elif missing := now.shape.missing(
        name,
        row.table,
        now.kind,
        inserts_only=row.inserts_only,
        filtered=row.row_filter is not None,
    ):
        yield found(missing.code, missing.what, f"{missing.remedy} -- then {resync}")
    elif row.row_filter is not None and now.twice:
        yield found(
            "publication_row_filter",
            "both publications of the source have it, and the server sends the rows of either:"
            " those that where leaves out, too",
            f"Take it out of the one that isn't {name}, then {resync}",
        )
    elif before is not None and now.published_as and before.was_put_back(now.published_as):
        yield found(
            "publication_altered",
            f"somebody altered the publication {name} and put it back: what it may have"
            " left out meanwhile is missing",
            resync,
        )
