"""What all parts of a backfill have in common, from one look at the table to the next."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from cdc_assets.backfill.apply import Done, Looked, apply, keys_of
from cdc_assets.backfill.horizons import Horizons, Proven
from cdc_assets.backfill.reader import Again, Part, unaltered
from cdc_assets.errors import TablePaused, TableProblem
from cdc_assets.lake.spark.sql import ticked
from cdc_assets.lake.tables import LakeTable
from cdc_assets.log.backfills import Applied
from cdc_assets.materializer.reread import pieces_of
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.catalog import check_oid
from cdc_assets.postgres.key_lookup import Key
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.session.connect import Connection
from cdc_assets.postgres.slots import current_lsn
from cdc_assets.verify.point import FlushTo
from cdc_assets.verify.rows import as_of

# Rows that are looked up together; and how often those that change meanwhile are in the end.
KEYS, ROUNDS = 5_000, 3


@dataclass(slots=True)
class Round:
    """``lake``: the table, with the columns that rows are read by. ``witness``: see ``apply``.

    ``searched``: up to where the log was, for changes that left values out. ``partial``: the keys
    of these, whose values may be damaged in the lake: their rows are still to be read, by key.
    """

    pipeline: Pipeline
    session: SparkSession
    lake: LakeTable
    horizons: Horizons
    flush_to: FlushTo
    witness: Connection
    searched: int
    partial: dict[Key, int]

    @property
    def searched_from(self) -> int:
        """From where on who goes on with the backfill has to search the log."""
        return min(self.partial.values(), default=self.searched)

    def apply(self, some: Looked) -> Done:
        """Apply what was read. Raises Again where that doesn't count, or can't be done now.

        A snapshot shows commits that a crash, or a failover, may still take back; then the WAL goes
        on otherwise at the same LSNs. The witness, a session that began before anything was read,
        doesn't outlive that. Raises psycopg.OperationalError if it is gone.
        """

        def flush_to(lsn: Lsn, *, seconds: float | None = None) -> None:
            self.flush_to(lsn, seconds=seconds)
            self.witness.execute("select 1")

        try:
            done = apply(
                self.pipeline,
                self.session,
                self.lake,
                some,
                flush_to,
                self.searched,
            )
        except (Again, TablePaused):
            raise
        except TableProblem as problem:  # of its merges: they may go on in a moment
            raise Again(self.lake.row.table, problem.what, problem.remedy) from problem
        self.horizons.reached(done.offset)
        self.searched = done.searched
        self.partial |= done.partial
        return done

    def catch_up(self) -> bool:
        """Apply the log up to now. Whether it is searched as far, too; else it goes on."""
        with closing(self.pipeline.connect_source("backfill")) as source:
            horizon = self.horizons.proven(source)
            nothing = pa.array([], pa.string())
            done = self.apply(Looked(nothing, [], [], horizon, current_lsn(source)))
        return done.searched >= done.offset

    def is_proven(self, offset: int) -> bool:
        """Whether a horizon is above all that the log has before ``offset``, without waiting.

        The second look proves what the first observes, if nobody has written.
        """
        with closing(self.pipeline.connect_source("backfill")) as source:
            return any(self.horizons.cover(source, offset) for _ in range(2))

    def heal(self, write: Callable[[Looked], None], proven: Callable[[int], bool]) -> None:
        """Read the rows of ``partial``, for ``write``; it has those again that change meanwhile.

        ``proven``: as :meth:`is_proven`, which may wait. By an earlier horizon, rows would be left
        to the stream for the very changes that were searched: then they are still to be read.
        """
        due = list(self.partial)
        for first in range(0, len(due), KEYS):
            if not proven(self.searched):
                return
            some = {key: self.partial.pop(key) for key in due[first : first + KEYS]}
            try:
                for looked in self.by_key(list(some)):
                    write(looked)
            except BaseException:
                self.partial = some | self.partial
                raise

    def healed(self, write: Callable[[Looked], None], proven: Callable[[int], bool]) -> str | None:
        """:meth:`heal` all of them; or what is to be said of those that change all the time."""
        for _ in range(ROUNDS):
            self.heal(write, proven)
        if not self.partial:
            return None
        return (
            f"{len(self.partial):,} rows changed whenever they were read again: what their changes"
            " left out may be damaged still"
        )

    def by_key(self, keys: Sequence[Key]) -> Iterator[Looked]:
        """The rows of some keys, as the source has them now."""
        with closing(self.pipeline.connect_source("backfill", reads=True)) as source:
            for first in range(0, len(keys), KEYS):
                some = keys[first : first + KEYS]
                check_oid(source, self.lake.row.table, self.lake.row.oid)
                horizon = self.horizons.proven(source)
                pieces = pieces_of(self.pipeline, source, self.lake, some)
                while True:
                    with unaltered(self.lake):
                        piece = next(pieces, None)
                    if piece is None:
                        break
                    # A row's own key: the log has that, not another text of the same value.
                    of = {self._key(row): row for _, row in piece.found}
                    rows = pa.array(of.values(), pa.string())
                    yield Looked(rows, list(of), [], horizon, current_lsn(source))

    def _key(self, row: str) -> Key:
        values = json.loads(row)
        return tuple(values[column.source.name] for column in self.lake.key)

    def doubled(self, most: int) -> list[Key]:
        """Keys that the lake has more than one row of: one that only it had, and one that came."""
        keys = keys_of(as_of(self.session, self.lake, self.lake.state().snapshot_id))
        found = keys.groupBy(*keys.columns).count().where("count > 1").limit(most).collect()
        return [tuple(row)[:-1] for row in found]

    def nameless(self) -> str | None:
        """What is to be said of rows of the lake that no row of the source can be."""
        rows = self.session.table(self.lake.sql_name)
        count = (
            rows.where(" or ".join(f"{ticked(column.name)} is null" for column in self.lake.key))
            .agg(F.count("*"))
            .collect()[0][0]
        )
        if not count:
            return None
        return (
            f"{count:,} rows of its lake table have NULL in their key, which no row of the source"
            " has: delete them there, or copy it anew"
        )


@dataclass
class Chunk:
    """What was applied of a chunk so far."""

    parts: list[tuple[Lsn, Lsn, int, float]] = field(default_factory=list)

    def add(self, part: Part) -> None:
        self.parts.append((part.horizon.lsn, part.lsn, len(part.data), part.seconds))

    def applied(self, chunk: int) -> Applied:
        horizons, lsns, rows, seconds = zip(*self.parts, strict=True)
        return Applied(chunk, min(horizons), max(lsns), sum(rows), sum(seconds))


def together(group: list[Part]) -> Looked:
    """Parts as one: nothing that counts by it wouldn't count by its own horizon."""
    horizon = Proven(
        min(part.horizon.lsn for part in group), min(part.horizon.offset for part in group)
    )
    return Looked(
        pa.concat_arrays([part.data for part in group]),
        [key for part in group for key in part.keys],
        [],
        horizon,
        max(part.lsn for part in group),
    )
