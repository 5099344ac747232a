"""Rows that only the lake has: its keys are looked up at the source, some thousands at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

import psycopg
import pyarrow as pa

from cdc_assets.backfill.apply import Looked, keys_of
from cdc_assets.backfill.horizons import Proven
from cdc_assets.backfill.reader import unaltered
from cdc_assets.backfill.round import Round
from cdc_assets.materializer.reread import there
from cdc_assets.postgres.catalog import check_oid
from cdc_assets.postgres.key_lookup import Key
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.session.connect import Connection
from cdc_assets.postgres.slots import current_lsn
from cdc_assets.verify.point import kept
from cdc_assets.verify.rows import Beside, as_of

# Keys that are looked up together, and that are removed in one commit, at most.
_KEYS, _GONE = 10_000, 50_000
# What was looked up waits for more of it so long, at most: the log since then is looked at.
_WAITS_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Surplus:
    """A lake table's keys, as of a snapshot of it, and the source that may lack them."""

    work: Round

    def looked(self, look: Callable[[], None]) -> Iterator[Looked]:
        """What of them the source doesn't have, as ``gone``. ``look`` may raise, to end it."""
        lake, horizons = self.work.lake, self.work.horizons
        snapshot_id = lake.state().snapshot_id
        beside = as_of(self.work.session, lake, snapshot_id)
        with (
            kept(self.work.session, lake, snapshot_id),
            closing(self.work.pipeline.connect_source("backfill", reads=True)) as source,
        ):
            gone, since = list[Key](), time.monotonic()
            horizon, lsn = None, Lsn.ZERO
            for keys in self._keys(beside):
                look()
                latest = horizons.proven(source)
                check_oid(source, lake.row.table, lake.row.oid)
                with unaltered(lake):
                    found = self._lacking(source, keys)
                if found:
                    horizon = _earlier(horizon, latest)
                    gone, lsn = gone + found, current_lsn(source)
                if gone and (len(gone) >= _GONE or time.monotonic() - since > _WAITS_SECONDS):
                    assert horizon is not None
                    yield _looked(gone, horizon, lsn)
                    gone, horizon = [], None
                if not gone:
                    since = time.monotonic()
            if horizon is not None:
                yield _looked(gone, horizon, lsn)

    def _keys(self, beside: Beside) -> Iterator[list[Key]]:
        """Of the lake; none with NULL, which nothing at the source has."""
        some = list[Key]()
        for row in keys_of(beside).toLocalIterator():
            some.append(tuple(row))
            if len(some) == _KEYS:
                yield some
                some = []
        if some:
            yield some

    def _lacking(self, source: Connection, keys: list[Key]) -> list[Key]:
        """Those that the source has no row of: it can't of a text that is no value of the type."""
        try:
            found = there(self.work.pipeline, source, self.work.lake, keys)
        except psycopg.DataError:
            if len(keys) == 1:
                return keys
            middle = len(keys) // 2
            return self._lacking(source, keys[:middle]) + self._lacking(source, keys[middle:])
        return [key for place, key in enumerate(keys) if place not in found]


def _looked(gone: list[Key], horizon: Proven, lsn: Lsn) -> Looked:
    return Looked(pa.array([], pa.string()), [], gone, horizon, lsn)


def _earlier(one: Proven | None, other: Proven) -> Proven:
    if one is None:
        return other
    return Proven(min(one.lsn, other.lsn), min(one.offset, other.offset))
