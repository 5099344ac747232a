"""What has to be right before a process begins: whatever is wrong is said at once, or it starts.

The flusher's part of ``check`` (``readiness`` has the rest: this one is imported by every flusher,
and must not take Spark along). What a process meets while it works stays where it is met. What the
log remembers of the source is judged in ``postgres.admission``, which knows when it may begin anew;
here it is only named beside other errors. An error of one table never stops the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import psycopg

from cdc_assets.config import SourceConfig
from cdc_assets.errors import CdcError, NotReady, StagingProblem, first_line
from cdc_assets.flusher.staging import check_place
from cdc_assets.log.files import Storage
from cdc_assets.log.schema import newest, version
from cdc_assets.log.store import LogStore
from cdc_assets.pipeline import coordination_dsn, source_dsn
from cdc_assets.postgres.connect import connect
from cdc_assets.postgres.findings import Finding
from cdc_assets.postgres.preflight import preflight

# A database that is down comes back by itself: that is waited for, or tried again.
_PASSING = frozenset({"source_unreachable", "coordination_unreachable"})


def refuse(findings: Iterable[Finding]) -> None:
    """Raise NotReady naming every error, if there is one that waiting may not mend.

    What only a database that is down is to blame for isn't refused here: whoever connects next
    meets it, and knows whether to wait.
    """
    errors = list(dict.fromkeys(f for f in findings if f.severity == "error" and f.table is None))
    if {finding.code for finding in errors} - _PASSING:
        raise NotReady(
            [finding.code for finding in errors],
            "; ".join(f"{f.code}: {f.message.rstrip('.')}" for f in errors) + ".",
            " ".join(dict.fromkeys(finding.remedy for finding in errors if finding.remedy)),
        )


def refuse_to_flush(config: SourceConfig) -> None:
    """Raise NotReady if anything is wrong that the flusher of ``config`` needs.

    Tables aren't looked at one by one: there may be thousands, and whoever registers them parks
    those that can't go on. Costs a few round trips, and one small file.
    """
    refuse([*source_findings(config, start=True), *coordination_findings(config), *staging(config)])


def source_findings(config: SourceConfig, *, start: bool = False) -> list[Finding]:
    """What is wrong with the source.

    ``start``: not with single tables; and what the log remembers of the source is only compared
    where something else is wrong, too.
    """
    try:
        dsn = source_dsn(config)
        with connect(dsn, application_name="cdc_assets check") as source, _known(config) as store:
            if not start:
                return preflight(source, config, store, dsn)
            found = preflight(source, config, None, dsn, tables=(), record=False)
            wrong = any(finding.severity == "error" for finding in found)
            return preflight(source, config, store, dsn, tables=()) if wrong else found
    except (psycopg.OperationalError, CdcError) as error:
        return [
            Finding(
                "source_unreachable",
                "error",
                f"the source can't be reached: {_what(error)}",
                _remedy(error, "Start it, mend the network, or correct postgres.dsn."),
            )
        ]


def _what(error: Exception) -> str:
    return error.what if isinstance(error, CdcError) else first_line(error)


def _remedy(error: Exception, otherwise: str) -> str:
    return (error.remedy if isinstance(error, CdcError) else "") or otherwise


@contextmanager
def _known(config: SourceConfig) -> Iterator[LogStore | None]:
    """What is remembered of the source, if anything can be read; never created or migrated here."""
    store = None
    with suppress(psycopg.OperationalError):  # has a finding of its own
        store = LogStore.peek(coordination_dsn(config), config.name, config.state.schema_)
    try:
        yield store
    finally:
        if store is not None:
            store.close()


def coordination_findings(config: SourceConfig) -> Iterator[Finding]:
    """What is wrong with the coordination database."""
    schema = config.state.schema_
    try:
        with connect(coordination_dsn(config), application_name="cdc_assets check") as state:
            found, known = version(state, schema), newest()
    except (psycopg.OperationalError, CdcError) as error:
        yield Finding(
            "coordination_unreachable",
            "error",
            f"the coordination database can't be reached: {_what(error)}",
            _remedy(error, "Start it, mend the network, or correct state.postgres_url."),
        )
        return
    if found > known:
        yield Finding(
            "coordination_newer",
            "error",
            f"the coordination schema {schema} is at version {found}, this program knows {known}.",
            "Upgrade cdc_assets here too.",
        )
    elif 0 < found < known:
        yield Finding(
            "coordination_older",
            "info",
            f"the coordination schema {schema} is at version {found}; the first start makes it"
            f" {known}.",
            "",
        )


def staging(config: SourceConfig) -> Iterator[Finding]:
    """Whether staged files can be written."""
    if config.snapshot.mode == "snapshot_only":
        return
    try:
        check_place(config.staging_uri, config.name, Storage.of(config.s3))
    except StagingProblem as error:
        yield Finding("staging_unwritable", "error", error.what, error.remedy)
