"""What is told of a table's copy while it goes on."""

from __future__ import annotations

from dataclasses import dataclass

from cdc_assets.log.copies.chunks import ChunkProgress
from cdc_assets.postgres.names import TableId


@dataclass(frozen=True, slots=True)
class CopyProgress:
    """Progress of a table's copy; ``landed``: the chunks that landed since the last report."""

    table: TableId
    landed: tuple[ChunkProgress, ...]
    chunks_done: int
    chunks_total: int
    rows: int
    bytes: int
    seconds: float

    @property
    def sentence(self) -> str:
        """For a run's log: percent, rate and the time that remains."""
        rate = self.rows / self.seconds if self.seconds else 0.0
        left = self.chunks_total - self.chunks_done
        done_here = max(1, self.chunks_done)
        return (
            f"{self.table}: {self.chunks_done}/{self.chunks_total} chunks"
            f" ({100 * self.chunks_done / max(1, self.chunks_total):.0f} %), {self.rows:,} rows,"
            f" {self.bytes / 1e6:,.1f} MB, {rate:,.0f} rows/s,"
            f" about {self.seconds / done_here * left:,.0f} s left"
        )
