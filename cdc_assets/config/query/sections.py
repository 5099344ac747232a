"""How changes are found by queries, where nothing can be decoded."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from cdc_assets.config.base import Duration, Section
from cdc_assets.config.sections import Every


class DeletesConfig(Section):
    """How rows are found that were deleted at the source, which no query of changes shows."""

    every: Every = timedelta(days=1)
    """How often the keys of each lake table are looked up at the source; null: only by hand
    (cdc-assets backfill --deletes)."""


class QueryConfig(Section):
    """Changes are found by asking for rows with a new watermark: no slot, no publication."""

    every: Annotated[Duration, Field(ge=timedelta(milliseconds=100))] = timedelta(seconds=30)
    """How often each table is asked."""
    deletes: DeletesConfig = DeletesConfig()


class WatermarkConfig(Section):
    """The column that each change of a row sets anew, and what it is set from."""

    column: str
    """As at the source; NOT NULL, and best indexed together with the key."""
    order: Literal["clock", "sequence"] = "clock"
    """clock: the server's time (now(), clock_timestamp()). sequence: numbers of one sequence."""
    lag: Annotated[Duration, Field(ge=timedelta(0), le=timedelta(days=3650))] = timedelta(0)
    """Of order clock: how far each query looks back beyond what is known to be needed. On a standby
    and for foreign tables it has to be longer than any transaction that writes, for materialized
    views than the time between two REFRESHes as well; else it is for other clocks that set the
    column."""
    lag_numbers: Annotated[int, Field(ge=0)] = 0
    """The same of order sequence: how many numbers. For sequences with a cache, whose numbers
    sessions may keep for long."""

    @model_validator(mode="after")
    def _of_its_order(self) -> Self:
        if self.order == "sequence" and self.lag:
            raise ValueError("lag: it goes with order: clock; order: sequence has lag_numbers")
        if self.order == "clock" and self.lag_numbers:
            raise ValueError("lag_numbers: it goes with order: sequence; order: clock has lag")
        return self

    @property
    def units(self) -> int:
        """The lag in the bounds' unit: microseconds, or numbers of the sequence."""
        return self.lag_numbers or round(self.lag.total_seconds() * 10**6)
