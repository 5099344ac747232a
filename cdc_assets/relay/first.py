"""The first source, whose log is passed on: what it has to be, and its tables as it logs them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from cdc_assets.config.groups.lakes import LogConfig
from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import ConfigurationError, SourceMismatch, TableProblem
from cdc_assets.log.asked.wishes import dropped_since
from cdc_assets.log.groups.cursors import copy_name, drop
from cdc_assets.log.groups.lakes import LOG_GROUP, LOG_OF, lake_of_group
from cdc_assets.log.staged.watermarks import ReadAt
from cdc_assets.log.store import LogStore
from cdc_assets.log.table_row import TableRow
from cdc_assets.log.verified import note_written
from cdc_assets.messages.texts import command
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.publication.row_filters import same_text

_SYSTEM = "system_identifier"
# A second lake has none: its tables are all its own.
_CLAIMED = "select 1 from claims where consumer_group = %s and source = %s limit 1"


def beside(store: LogStore, source: str) -> LogStore:
    """Another source's log in the same schema, on the same session."""
    return LogStore(store.connection, source, store.schema)


def _mismatch(code: str, what: str, remedy: str) -> SourceMismatch:
    return SourceMismatch([code], what, remedy)


def first_log(config: SourceConfig, store: LogStore) -> LogStore:
    """The log that ``log.of`` names, on the same session; it may not have begun yet.

    Raises SourceMismatch if it can't be passed on, or CoordinationError if it was moved away.
    """
    assert config.log is not None
    of = config.log.of
    first = beside(store, of)
    if (since := dropped_since(first)) is not None:
        raise _mismatch(
            "log_dropped",
            f"source {of}, whose log this is, was dropped at {since}: nothing more comes.",
            f"Drop {store.source}, too ({command('drop-source')}). To go on with a slot of its own,"
            f" take log: out of its configuration then, and: {command('resume')}",
        )
    if (further := first.meta(LOG_OF)) is not None:
        raise _mismatch(
            "log_of_another",
            f"source {of} has no log of its own, but that of {further}.",
            f"Set log: {{of: {further}}}, with a group of its own there.",
        )
    if ReadAt.last(first) is not None:
        raise _mismatch(
            "log_of_queries",
            f"source {of} is in query mode, whose log has no LSN at which it is the source.",
            "Query the source for the second lake, too.",
        )
    if (other := lake_of_group(first, config.log.group)) not in (None, store.source):
        raise _mismatch(
            "log_group_taken",
            f"the consumer group {config.log.group} of source {of} is the lake of source {other}:"
            " what one has merged would be removed before the other has.",
            "Give log.group another name, and add it to consumers: there.",
        )
    if first.connection.execute(_CLAIMED, (config.log.group, of)).fetchone():
        raise _mismatch(
            "log_group_taken",
            f"the consumer group {config.log.group} of source {of} is that of programs: what this"
            " lake has merged would be removed before they have read it.",
            "Give log.group another name, and add it to consumers: there. If nobody reads as this"
            f" one any more, with {of}'s: {command('drop-group', config.log.group)}",
        )
    refuse_other_log(config, store)
    known, ours = first.meta(_SYSTEM), store.meta(_SYSTEM)
    if known is not None and ours is not None and known != ours:
        raise _mismatch(
            "other_cluster",
            f"postgres.dsn of {store.source} leads to another Postgres cluster (system identifier"
            f" {ours}) than the one that the log of {of} is of ({known}).",
            f"Correct it; if {of} has moved: {command('resync', '--all')}.",
        )
    return first


def refuse_other_log(config: SourceConfig, store: LogStore) -> None:
    """Raise SourceMismatch if the log was begun with another ``log`` than the configuration has.

    Nobody would let go of what it holds: a slot of its own, or a group's cursors in the first log.
    """
    of, group = store.meta(LOG_OF), store.meta(LOG_GROUP)
    wanted = (None, None) if config.log is None else (config.log.of, config.log.group)
    if (of, group) == wanted or (config.log is not None and store.flushed_lsn() is None):
        return
    had = "of its own" if of is None else f"that is that of {of}, as its consumer group {group}"
    then = "without log:" if of is None else f"with log: {{of: {of}, group: {group}}}"
    raise _mismatch(
        "log_before",
        f"source {store.source} has a log {had}, and what that holds would never be let go of.",
        f"Configure it {then} as before, and: {command('drop-source')}. With the configuration as"
        f" it is now, after that: {command('resume')}",
    )


def refuse_shared_log(config: SourceConfig, store: LogStore) -> None:
    """Raise ConfigurationError if two lakes have the log: both are in one schema.

    Raises SourceMismatch like :func:`refuse_other_log`.
    """
    refuse_other_log(config, store)
    of = config.log_name
    rows = store.connection.execute(
        "select source from pipeline_meta where key = %s and value = %s order by 1", (LOG_OF, of)
    ).fetchall()
    if seconds := [name for (name,) in rows]:
        raise ConfigurationError(
            f"the log of source {of} is that of {', '.join(seconds)}, too: both stay in one"
            " coordination schema.",
            f"Give these up first ({command('drop-source')} with their configuration).",
        )


def hold_nothing(store: LogStore, log: LogConfig, table: TableId | None = None) -> None:
    """Let go of what the group holds in the first log, or (``table``) of that table's."""
    first = beside(store, log.of)
    for each in drop(first, log.group, table):
        note_written(first, each)  # maintenance would leave a quiet table alone for a day


def forget_passed_on(first: LogStore, table: TableId, starts: Sequence[int]) -> None:
    """Remove entries from the second logs as well: their files go with the first log's."""
    first.connection.execute(
        "delete from log_index where table_name = %s and start_offset = any(%s) and source in"
        " (select source from pipeline_meta where key = %s and value = %s)",
        (str(table), list(starts), LOG_OF, first.source),
    )


def logged_copy(theirs: TableRow | None) -> str | None:
    """The copy of a table since whose pin the first log has all of its changes; None without."""
    if theirs is None or not theirs.oid or theirs.followed_since is None:
        return None
    return copy_name(theirs.epoch, theirs.followed_since)


def logged_inserts(config: SourceConfig, store: LogStore) -> Mapping[TableId, bool]:
    """Of each table that the first source logs, whether it logs the inserts alone; no first: none.

    The publication that it is in, and where its row filter is, was chosen there, when its key and
    replica identity may have been others than now.
    """
    if config.log is None:
        return {}
    there = beside(store, config.log.of).tables()
    return {row.table: row.inserts_only for row in there if logged_copy(row) is not None}


def why_no_log(of: str) -> str:
    """Why no table begins, for a person: the first source has none, or has another name."""
    return f"source {of} has no log in this coordination schema yet: start it, or correct log.of."


def why_unlogged(of: str, theirs: TableRow | None) -> str:
    """Why :func:`logged_copy` is None, for a person."""
    if theirs is None or not theirs.oid:
        return f"source {of} doesn't replicate it: add it to the tables: there."
    said = f" ({theirs.reason})" if theirs.reason else ""
    return f"source {of} has to log it first, and there it is {theirs.state}{said}."


def why_of_another(of: str) -> str:
    """Why a table's log is of no use, whose oid is another there, for a person."""
    return (
        f"what source {of} logs is another table of that name. If this one has taken its place,"
        f" {of} is about to notice; if not, both need the same postgres.dsn."
    )


def staged_otherwise(of: str, ours: TableRow, theirs: TableRow) -> TableProblem | None:
    """The problem of a table whose staged rows aren't those that the configuration asks for."""
    for differs, what, remedy in _differences(of, ours, theirs):
        if differs:
            return TableProblem(
                ours.table,
                f"the log of {of} {what}; what is staged is the same for both lakes",
                f"Here {remedy}, or change it there and copy it anew there; then:"
                f" {command('resync', ours.table)}",
            )
    return None


def _differences(of: str, ours: TableRow, theirs: TableRow) -> Iterator[tuple[bool, str, str]]:
    left_out = _listed(theirs.excluded), _listed(ours.excluded)
    yield (
        ours.excluded != theirs.excluded,
        "excludes {}, and here {} is excluded".format(*left_out),
        f"write columns.exclude as in {of}",
    )
    masked = _listed(theirs.masks), _listed(ours.masks)
    yield (
        ours.masks != theirs.masks,
        "masks {}, and here {} is masked, or with another mask_salt".format(*masked),
        f"write columns.mask and mask_salt as in {of}",
    )
    yield (
        not same_text(ours.filter_wanted, theirs.filter_wanted),
        f"has its rows where {theirs.filter_wanted or 'true'}",
        f"write where as in {of}",
    )
    yield (
        theirs.inserts_only and ours.mode != "append",
        "has its inserts alone",
        "set mode: append, which is all of them",
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
