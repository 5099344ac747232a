"""Which publications the stream asks for, from which LSN on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cdc_assets.config.source import SourceConfig
from cdc_assets.log.store import LogStore
from cdc_assets.log.table_row import TableRow
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.publication.contents import inserts_publication, publication_oid
from cdc_assets.postgres.session.connect import Connection
from cdc_assets.postgres.slots import NewSlot

# In pipeline_meta: the oid of the publication of inserts, and the LSN from which it may be used.
INSERTS_FROM = "inserts_from"


def inserts_from(source: Connection, config: SourceConfig, store: LogStore) -> Lsn | None:
    """The LSN from which the stream may ask for the publication of inserts, None if it never may.

    Before version 18 the server decodes each change with the publications of that moment, and fails
    for ever at one from before the publication was made.
    """
    oid = publication_oid(source, inserts_publication(config.publication))
    known, _, lsn = (store.meta(INSERTS_FROM) or "").partition(" ")
    return Lsn.parse(lsn) if oid is not None and known == oid else None


def set_inserts_from(source: Connection, config: SourceConfig, store: LogStore, lsn: Lsn) -> None:
    """Remember the consistent point of a slot that was made after the publication of inserts.

    Every transaction that commits from there on began after the publication was made.
    """
    oid = publication_oid(source, inserts_publication(config.publication))
    if oid is not None:
        store.set_meta(INSERTS_FROM, f"{oid} {lsn}")


def begin_inserts(
    source: Connection,
    config: SourceConfig,
    store: LogStore,
    waiting: Sequence[TableRow],
    temporary_slot: Callable[[], NewSlot],
) -> None:
    """Find the LSN from which the publication of inserts may be used, if it came late."""
    late = any(row.inserts_only for row in waiting)
    if late and inserts_from(source, config, store) is None:
        made = temporary_slot()
        made.connection.close()
        set_inserts_from(source, config, store, made.consistent_point)


def streamed_publications(pipeline: Pipeline, at: Lsn) -> tuple[str, ...]:
    """The publications that a stream from ``at`` on asks for.

    The source is only queried if the log has it that there may be two.
    """
    main = pipeline.config.publication
    if not (known := pipeline.store.meta(INSERTS_FROM)) or at < Lsn.parse(known.split()[1]):
        return (main,)
    with pipeline.connect_source("publications") as source:
        since = inserts_from(source, pipeline.config, pipeline.store)
    return (main,) if since is None or at < since else (main, inserts_publication(main))
