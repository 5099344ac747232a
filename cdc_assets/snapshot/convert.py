"""From COPY's values in Arrow to the lake's: the snapshot's half of ``postgres.types``.

This module runs inside Spark's Python workers.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from cdc_assets.masks import Mask
from cdc_assets.postgres.copy_out.kinds import Kind
from cdc_assets.postgres.types import arrow_type

# Values that :func:`repeats` looks at; and which part of their second half may be new values.
SAMPLE, _NEW = 10_000, 0.1
# Postgres's numeric values that no decimal holds.
_SPECIAL = pa.array(["NaN", "Infinity", "-Infinity"])

# Days and microseconds of 0001-01-01 and 9999-12-31T23:59:59.999999, the range of Spark's calendar.
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896
_DAY_US = 86_400_000_000
_FIRST_US, _LAST_US = _FIRST_DAY * _DAY_US, (_LAST_DAY + 1) * _DAY_US - 1
# Infinity is the largest integer, counted from 2000; from 1970, 10,957 days earlier, it wraps
# around. No date in Postgres is as early as the result.
_INFINITE_DAY = 2**31 - 1 + 10_957 - 2**32
_INFINITE_US = 2**63 - 1 + 10_957 * _DAY_US - 2**64


class DoesNotFit(Exception):
    """Names a column with policy ``fail`` that has a value without a form in the lake."""


@dataclass(frozen=True, slots=True)
class LakeField:
    """A column of the lake: its name, Spark SQL type, Iceberg field ids, and the policy.

    ``sent``: what COPY sends of it (``Kind``); ``mask``: what is written of that.
    """

    name: str
    sent: str
    lake: str
    field_id: int
    element_id: int | None
    policy: str
    mask: Mask | None = None

    @property
    def kind(self) -> Kind:
        return Kind(self.sent, arrow_type(self.lake))

    @property
    def arrow(self) -> pa.Field:
        """For the Parquet file: Iceberg finds columns by field id, whatever they are called."""
        kind = arrow_type(self.lake)
        if self.element_id is not None:
            element = kind.value_type
            kind = pa.list_(pa.field("element", element, metadata=_id(self.element_id)))
        return pa.field(self.name, kind, metadata=_id(self.field_id))


def _id(number: int) -> dict[str, str]:
    return {"PARQUET:field_id": str(number)}


def repeats(values: pa.Array) -> bool:
    """Whether few values, as far as the first of them tell, make up the whole.

    Each of them is then cheaper to convert and to write once, in a dictionary; where new ones keep
    coming, a dictionary is built in vain.
    """
    sample = values[:SAMPLE]
    if pa.types.is_list(sample.type):
        sample = sample.flatten()
    half = len(sample) // 2
    new = pc.count_distinct(sample).as_py() - pc.count_distinct(sample[:half]).as_py()
    return bool(new <= _NEW * (len(sample) - half))


def convert(batch: pa.RecordBatch, fields: list[LakeField], schema: pa.Schema) -> pa.RecordBatch:
    """The batch with the lake's types. Raises DoesNotFit."""
    columns = []
    for position, (field, target) in enumerate(zip(fields, schema, strict=True)):
        values = batch.column(position)
        if field.mask is not None:
            values = field.mask.array(values)
        fitted = _fit(values, field.lake, field)
        columns.append(fitted if fitted.type == target.type else fitted.cast(target.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _fit(values: pa.Array, lake: str, field: LakeField) -> pa.Array:
    if lake.startswith("array<"):
        if values.offset:
            values = pa.concat_arrays([values])
        inner = _fit(values.values, lake.removeprefix("array<").removesuffix(">"), field)
        return pa.ListArray.from_arrays(values.offsets, inner, mask=values.is_null())
    kind = arrow_type(lake)
    if pa.types.is_decimal(kind) and values.type != kind:
        if repeats(values):
            encoded = values.dictionary_encode()
            return _fit_decimal(encoded.dictionary, kind, field).take(encoded.indices)
        return _fit_decimal(values, kind, field)
    if lake in ("date", "timestamp_ntz", "timestamp"):
        return _fit_calendar(values, kind, field)
    return values if values.type == kind else values.cast(kind)


def _fit_decimal(texts: pa.Array, kind: pa.Decimal128Type, field: LakeField) -> pa.Array:
    try:
        return texts.cast(kind)
    except pa.ArrowInvalid:
        special = pc.is_in(texts, value_set=_SPECIAL)
        if field.policy == "fail" or not pc.any(special).as_py():
            raise DoesNotFit(field.name) from None
    if field.policy == "clamp":  # NaN sorts above everything in Postgres
        largest = "9" * (kind.precision - kind.scale) + "." + "9" * kind.scale
        texts = pc.if_else(pc.equal(texts, "-Infinity"), f"-{largest}", texts)
        texts = pc.if_else(pc.is_in(texts, value_set=_SPECIAL), largest, texts)
    else:
        texts = pc.if_else(special, pa.scalar(None, texts.type), texts)
    return texts.cast(kind)


def _fit_calendar(values: pa.Array, kind: pa.DataType, field: LakeField) -> pa.Array:
    days = pa.types.is_date32(kind)
    raw = values.view(pa.int32() if days else pa.int64())
    low, high = (_FIRST_DAY, _LAST_DAY) if days else (_FIRST_US, _LAST_US)
    extent = pc.min_max(raw)
    smallest, largest = extent["min"].as_py(), extent["max"].as_py()
    if smallest is None or (smallest >= low and largest <= high):
        return values
    if field.policy == "fail":
        raise DoesNotFit(field.name)
    inside = pc.and_(pc.greater_equal(raw, low), pc.less_equal(raw, high))
    if field.policy == "clamp":
        bounds = [pa.scalar(bound, raw.type) for bound in (low, high)]
        infinite = pa.scalar(_INFINITE_DAY if days else _INFINITE_US, raw.type)
        # What is later than the wrap-around became as early; no value before it is.
        raw = pc.if_else(pc.less_equal(raw, infinite), bounds[1], raw)
        clamped = pc.max_element_wise(raw, bounds[0], skip_nulls=False)
        return pc.min_element_wise(clamped, bounds[1], skip_nulls=False).view(values.type)
    return pc.if_else(inside, raw, pa.scalar(None, raw.type)).view(values.type)
