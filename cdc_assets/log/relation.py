"""The relation of a staged file's rows: the Relation message that preceded them.

One file has one relation. A batch is cut where the relation changes, so that a schema change is
applied between the rows before and after it. ``materializer.schema.match`` decides what a change
means for the lake.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from cdc_assets.log.batch import Outline
from cdc_assets.log.states import TableState
from cdc_assets.log.table_row import TableRow
from cdc_assets.postgres.catalog import SourceTable, another, attributes, describe
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.pgoutput import RelationColumn
from cdc_assets.postgres.publication.contents import sent_columns
from cdc_assets.postgres.session.connect import Connection


@dataclass(frozen=True, slots=True)
class Told:
    """A table as the stream reports it, or the catalog in its stead.

    ``identity`` is the replica identity: d(efault), n(othing), f(ull), i(ndex). With f(ull) every
    column is flagged as the key's. ``numbers``: the columns' attribute numbers, which only the
    catalog reports.
    """

    identity: str
    columns: tuple[RelationColumn, ...]
    numbers: tuple[int, ...] = ()
    full_key: tuple[str, ...] | None = None
    """The key under f(ull), which only the catalog reports."""

    def same(self, row: TableRow) -> bool:
        """Whether the table is what ``row`` describes; the order of its key doesn't matter."""
        if self.numbers and self.numbers != tuple(c.number for c in row.columns):
            return False
        columns = [(c.name, c.type_oid, c.modifier) for c in self.columns]
        return columns == [(c.name, c.type_oid, c.modifier) for c in row.columns] and set(
            self.key(row.key_columns)
        ) == set(row.key_columns)

    @property
    def keys_are_unique(self) -> bool:
        """Whether the stream itself says that a key is one row's at each moment.

        Under f(ull) it doesn't tell the key: that may be dropped, or deferred, and be there again.
        """
        return self.identity in ("d", "i")

    def key(self, known: Sequence[str]) -> tuple[str, ...]:
        """The names of the key's columns; ``known`` where the stream doesn't report them."""
        if self.identity in ("f", "n"):
            return tuple(known) if self.full_key is None else self.full_key
        return tuple(c.name for c in self.columns if c.is_key)


def alike(batch: Sequence[Outline]) -> tuple[list[Outline], Told]:
    """The leading entries that have the first one's relation, and that relation."""
    told = _told(batch[0])
    return list(takewhile(lambda outlined: _told(outlined) == told, batch)), told


def _told(outlined: Outline) -> Told:
    return told_by_file(outlined.relation)


def told_by_file(relation: Any) -> Told:
    """From a staged file's metadata, as parsed JSON."""
    columns = tuple(RelationColumn(*column) for column in relation["columns"])
    return Told(relation["identity"], columns)


_ALTERED = """
select attrelid::bigint, attgenerated::text, attnum, attname, atttypid::bigint, atttypmod
  from pg_catalog.pg_attribute
 where attrelid = any(%s::oid[]) and attnum > 0 and not attisdropped
 order by attrelid, attnum
"""


def altered(source: Connection, rows: Sequence[TableRow], publication: str) -> frozenset[TableId]:
    """The streaming tables that have other columns at the source than in the lake.

    One query for all; tables that are gone are left out.
    """
    streaming = [row for row in rows if row.state == TableState.STREAMING]
    oids = [row.oid for row in streaming]
    sent = sent_columns(source, publication, oids)
    now: dict[int, list[tuple[Any, ...]]] = {}
    for oid, generated, *column in source.execute(_ALTERED, (oids,)):
        if sent.has(oid, column[0], generated):
            now.setdefault(oid, []).append(tuple(column))
    return frozenset(
        row.table
        for row in streaming
        if row.oid in now
        and now[row.oid] != [(c.number, c.name, c.type_oid, c.modifier) for c in row.columns]
    )


def keyed(found: SourceTable, key: Sequence[str]) -> SourceTable:
    """A table that is queried, with ``key`` if it has none of its own, as no stream tells it."""
    if found.key_columns:
        return found
    return replace(found, key_columns=tuple(key), replica_identity="n")


def told_by_catalog(source: Connection, row: TableRow, publication: str) -> Told:
    """The table as a Relation message would report it now.

    Raises TableProblem if it is gone, or another one has its name.
    """
    found = describe(source, row.table)
    if found.oid != row.oid:
        raise another(row.table, row.oid)
    sent = sent_columns(source, publication, [found.oid])
    if not publication:  # it is queried
        found = keyed(found, row.key_columns)
    full = found.replica_identity == "f"
    key = () if found.replica_identity == "n" else found.key_columns
    now = [
        a
        for a in attributes(source, found.oid)
        if not a.dropped and sent.has(found.oid, a.number, a.generated)
    ]
    return Told(
        found.replica_identity,
        tuple(RelationColumn(a.name, a.type_oid, a.modifier, full or a.name in key) for a in now),
        tuple(a.number for a in now),
        found.key_columns if full else None,
    )
