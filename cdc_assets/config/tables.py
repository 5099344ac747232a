"""The configuration of one table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from psycopg import sql
from pydantic import AfterValidator, Field, WithJsonSchema, field_validator, model_validator

from cdc_assets.config.base import (
    DailyWindow,
    Duration,
    Namespace,
    Section,
    longest_seconds,
    seconds_left,
)
from cdc_assets.config.layout import parse_order, parse_part
from cdc_assets.config.patterns import TablePattern
from cdc_assets.config.query.sections import WatermarkConfig
from cdc_assets.config.snapshot import AdoptConfig, PinBy, Strategy
from cdc_assets.masks import MaskKind
from cdc_assets.postgres.names import TableId, is_free_in_lake, lake_column
from cdc_assets.postgres.publication.row_filters import refuse_text

_TAG = re.compile(r"\A([A-Za-z0-9][\w.-]{0,62}/)?[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?\Z")
_TAG_VALUE = re.compile(r"\A([A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?)?\Z")
# The owner of an asset as Dagster takes it: a team, or an address of mail.
_OWNER = re.compile(r"\Ateam:[A-Za-z0-9_.-]+\Z|\A[^@\s:]+@[^@\s:]+\.[^@\s:]+\Z")


def _owner(value: str) -> str:
    if not _OWNER.match(value):
        raise ValueError("write team:name or the address of somebody's mail")
    return value


def _word(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_]+", value):
        raise ValueError("Dagster takes letters, digits and underscores")
    return value


def _tags(value: Mapping[str, str]) -> Mapping[str, str]:
    for tag, said in value.items():
        if not _TAG.match(tag) or not _TAG_VALUE.match(said):
            raise ValueError(
                f"{tag}: Dagster takes up to 63 letters, digits, and . _ - inside, for a tag as for"
                " its value, which may be empty"
            )
        if tag.startswith(("dagster/", "cdc_assets/")):
            raise ValueError(f"{tag}: tags of dagster/ and cdc_assets/ aren't yours to set")
    return value


Owner = Annotated[str, AfterValidator(_owner)]
Word = Annotated[str, AfterValidator(_word)]
Tags = Annotated[Mapping[str, str], AfterValidator(_tags)]


class AssetsConfig(Section):
    """How its assets appear in Dagster."""

    key_prefix: tuple[Word, ...] = ()
    """Before the key of each of its assets. With another prefix they are other assets, without
    history."""
    group: Word | None = None
    """The group of its lake tables, by default the source's name. Its other assets are in groups of
    that name with _postgres, _snapshot, _staged_log and _maintenance appended."""
    tags: Tags = Field(default_factory=dict)
    """Tags of each of its assets."""

    @field_validator("key_prefix", mode="before")
    @classmethod
    def _several(cls, value: object) -> object:
        if isinstance(value, str):
            raise ValueError(f"write a list: [{value}]")  # noqa: TRY004 - pydantic takes this one
        return value


class ColumnsConfig(Section):
    """The columns that are replicated, and the treatment of values that Iceberg can't hold."""

    exclude: tuple[str, ...] = ()
    """Columns that stay in the source, under whatever name."""
    types: Mapping[str, Literal["string"]] = Field(default_factory=dict)
    """Columns to be kept in Postgres's text form instead of their native type."""
    rename: Mapping[str, str] = Field(default_factory=dict)
    """What columns are called in the lake, and so in partition_by and sort_by: {id: order_id}. A
    name that is given here is no other column's, whether the table has the column or not."""
    mask: Mapping[str, MaskKind] = Field(default_factory=dict)
    """Columns whose values don't leave the source as they are: sha256 (of mask_salt and the text,
    in hexadecimal), redact (***), last4 (**** and the last four characters). They are text in the
    lake; NULL stays NULL."""
    unrepresentable: Annotated[
        Literal["null", "clamp", "fail"],
        WithJsonSchema({"enum": ["null", "clamp", "fail", None]}),
    ] = "null"
    """A value that Iceberg can't hold becomes NULL, or the nearest one that it can, or fails."""

    @model_validator(mode="after")
    def _masked_alone(self) -> Self:
        for name in self.rename:
            if name in self.exclude:
                raise ValueError(f"rename: {name} is in exclude, too; keep one of the two")
        for name in self.mask:
            if name in self.exclude:
                raise ValueError(f"mask: {name} is in exclude, too; keep one of the two")
            if name in self.types:
                raise ValueError(f"types: {name} is masked, and so text anyway; remove it here")
        return self

    @field_validator("rename")
    @classmethod
    def _distinct(cls, value: Mapping[str, str]) -> Mapping[str, str]:
        for name, other in value.items():
            if not other or len(other) > 255 or not is_free_in_lake(other):
                raise ValueError(f"{name}: {other!r} can't be a column's name in the lake")
            if list(value.values()).count(other) > 1:
                raise ValueError(f"{name}: {other!r} is the name of two")
        return value

    @field_validator("unrepresentable", mode="before")
    @classmethod
    def _yaml_null(cls, value: object) -> object:
        return "null" if value is None else value  # an unquoted null in YAML means the word


class FreshnessConfig(Section):
    """How old a lake table is let become, and how old it may be before the UI warns and fails."""

    target: Annotated[Duration, Field(ge=timedelta(0))] = timedelta(seconds=5)
    """A merge is timed so that the oldest change is visible at about this age; 0s: at once. A
    merge has a fixed cost, so a shorter target costs CPU while changes are few."""
    warn: Duration = timedelta(minutes=5)
    """The age at which the UI warns, and an alert is sent."""
    fail: Duration = timedelta(minutes=15)
    """The age at which the table counts as failed."""
    quiet: tuple[str, ...] = ()
    """Times of a day in which nothing is merged by itself: 08:00-18:00, or 22:00-06:00
    Europe/Berlin (UTC by default). Changes are staged meanwhile."""

    @field_validator("quiet")
    @classmethod
    def _are_windows(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            DailyWindow.parse(text)
        return value

    @cached_property
    def _windows(self) -> tuple[DailyWindow, ...]:
        return tuple(map(DailyWindow.parse, self.quiet))

    def quiet_seconds(self, at: datetime) -> float:
        """How long nothing is merged, from ``at`` on; 0: it is no quiet time."""
        return seconds_left(self._windows, at) if self.quiet else 0.0

    def overdue_seconds(self, lag_seconds: float, at: datetime) -> float:
        """How long, at ``at``, a change of that age could have been merged and wasn't."""
        if self.quiet_seconds(at):
            return 0.0
        since = [(at - window.end_before(at)).total_seconds() for window in self._windows]
        return max(0.0, min([lag_seconds - self.target.total_seconds(), *since]))

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.warn >= self.fail:
            raise ValueError("warn has to be shorter than fail")
        if self.warn < timedelta(minutes=1):
            raise ValueError("at least 1m: Dagster's freshness policies know nothing shorter")
        longest = longest_seconds(self._windows)
        if longest >= timedelta(days=1).total_seconds():
            raise ValueError("quiet: it is quiet all day, so that nothing would ever be merged")
        longest += self.target.total_seconds()
        if self.quiet and longest >= self.warn.total_seconds():
            raise ValueError(
                f"quiet: a change may wait for {longest / 3600:.1f} h, and warn has to be longer"
                " than that (and fail longer than warn)"
            )
        if self.target >= self.warn:
            raise ValueError("target has to be shorter than warn")
        return self


# What a mode adds to the source's columns, with Spark SQL types. A copied row has no _ts and _xid.
DELETED_AT = "_deleted_at"
EXTRA_COLUMNS: Mapping[str, Mapping[str, str]] = {
    "mirror": {},
    "soft_delete": {DELETED_AT: "timestamp"},
    "append": {"_op": "string", "_lsn": "bigint", "_ts": "timestamp", "_xid": "bigint"},
}


# What ``metadata`` adds.
SYNCED_AT, LSN = "_synced_at", "_lsn"
METADATA_COLUMNS: Mapping[str, str] = {SYNCED_AT: "timestamp", LSN: "bigint"}


class TableConfig(Section):
    """One table of the source; in the YAML its name alone will do."""

    name: str
    """As SQL spells it: orders (of the schema public), sales.orders, public."My.Table". A pattern
    like public.* stands for every such table that the source has when it is loaded."""
    as_: Annotated[str | None, Field(alias="as", min_length=1, max_length=128)] = None
    """What it is called in the lake, if not as in the source."""
    namespace: Namespace | None = None
    """Its namespace in the lake, instead of lake.namespace."""
    mode: Literal["mirror", "soft_delete", "append"] | None = None
    """mirror: the source's rows. soft_delete: deleted rows stay, marked. append: one row a change;
    where Postgres can't identify changed rows, one an insert."""
    metadata: tuple[Literal["_synced_at", "_lsn"], ...] = ()
    """Columns of the lake table that say of each row when it was written there (_synced_at), and an
    LSN that all its changes had committed below (_lsn): of its copy, or of the merge that wrote it.
    Rows of before it was set have none."""
    only: bool = False
    """Of a table that others inherit from: its own rows, and not theirs."""
    columns: ColumnsConfig = ColumnsConfig()
    where: str | None = None
    """Which of its rows are replicated, as after WHERE: region = 'eu' and not test. Needs Postgres
    15, unless it is only copied. A replica identity that isn't full needs to have its columns;
    Postgres then refuses to drop them, or to change their type."""
    partition_by: tuple[str, ...] = ()
    """Columns and Iceberg transforms of them: day(created_at), bucket(16, id)."""
    sort_by: tuple[str, ...] = ()
    """What rows of a file are ordered by: customer_id, created_at desc."""
    chunk_pages: Annotated[int, Field(ge=1, le=2**31)] = 2048
    """Pages of 8 kB a chunk: 2,048 are 16 MB, about a second of work. Fewer where most of the rows'
    bytes are in TOAST: 64 MB with that."""
    strategy: Strategy | None = None
    """How its first copy is made, instead of snapshot.strategy."""
    pin: PinBy | None = None
    """What its pins are made with, instead of snapshot.pin."""
    adopt: AdoptConfig | None = None
    """Take its lake table over that is there already, instead of a copy."""
    watermark: WatermarkConfig | None = None
    """In query mode: by what its changes are found."""
    key: tuple[str, ...] = ()
    """In query mode: what identifies a row of a view, a foreign table, or a table without a key."""
    freshness: FreshnessConfig = FreshnessConfig()
    owners: tuple[Owner, ...] | None = None
    """Who looks after its assets, instead of the source's owners."""
    group: Word | None = None
    """The group of its assets in Dagster, instead of assets.group."""
    tags: Tags = Field(default_factory=dict)
    """Tags of its assets, beside assets.tags."""
    found: bool = False
    """Whether a pattern stands for it (``setup.discovery``): no other one's name depends on it."""

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @field_validator("partition_by")
    @classmethod
    def _are_transforms(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            parse_part(text)
        return value

    @field_validator("sort_by")
    @classmethod
    def _are_orders(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            parse_order(text)
        return value

    @field_validator("adopt", mode="before")
    @classmethod
    def _not_false(cls, value: object) -> object:
        return None if value is False else value

    @model_validator(mode="after")
    def _told_once(self) -> Self:
        if len({*self.metadata}) < len(self.metadata):
            raise ValueError("metadata: it names a column twice")
        if self.mode == "append" and LSN in self.metadata:
            raise ValueError("metadata: mode append has _lsn anyway, of each change; remove it")
        return self

    def added_columns(self, mode: str) -> Mapping[str, str]:
        """The columns that a mode and metadata add to the source's, with Spark SQL types."""
        return {**EXTRA_COLUMNS[mode], **{name: METADATA_COLUMNS[name] for name in self.metadata}}

    @field_validator("where")
    @classmethod
    def _is_one_condition(cls, value: str | None) -> str | None:
        if value is not None:
            if not (value := value.strip()):
                raise ValueError("write a condition, or leave it out")
            refuse_text(value)
        return value

    @field_validator("name")
    @classmethod
    def _as_in_sql(cls, value: str) -> str:
        if "*" in value or "?" in value:
            pattern = TablePattern.parse(value)
            if not pattern.is_name:
                return pattern.text
        return str(TableId.parse(value))

    @model_validator(mode="after")
    def _of_one_table(self) -> Self:
        if self.pattern is not None:
            plain = type(self).model_fields
            for key in ("as_", "only", "columns", "where", "partition_by", "sort_by", "key"):
                if getattr(self, key) != plain[key].default:
                    what = plain[key].alias or key
                    raise ValueError(f"{what} is for a table that is named, not for {self.name}")
        return self

    @model_validator(mode="after")
    def _partitioned_by_text(self) -> Self:
        for part in map(parse_part, self.partition_by):
            textual = part.transform.partition("[")[0] in ("identity", "bucket", "truncate", "void")
            masked = {lake_column(name, self.columns.rename) for name in self.columns.mask}
            if part.column in masked and not textual:
                raise ValueError(
                    f"partition_by: {part.column} is masked, and so text; partition by itself, by"
                    " bucket or truncate of it, or by something else"
                )
        return self

    @cached_property
    def pattern(self) -> TablePattern | None:
        """Of an entry that stands for several tables."""
        if "*" not in self.name and "?" not in self.name:
            return None
        pattern = TablePattern.parse(self.name)
        return None if pattern.is_name else pattern

    @cached_property
    def id(self) -> TableId:
        return TableId.parse(self.name)

    @property
    def rows(self) -> sql.Composed:
        """The FROM item of a query of its rows."""
        return sql.SQL("only {}" if self.only else "{}").format(self.id.identifier)
