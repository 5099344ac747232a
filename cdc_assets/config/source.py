"""The configuration: one shape for the Dagster component, the command line and the flusher.

A source's configuration as a whole, and its reading from YAML (JSON is YAML). Everything but name,
postgres and tables has a default; ``config.sections`` has what a section may say. ``${VAR}`` in a
value is taken from the environment, ``${aws-secret:NAME#KEY}`` from AWS Secrets Manager, so that no
secret has to be in a file; ``$${`` is ``${`` itself. Nothing else here connects to anything.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from cdc_assets.config.alerts import AlertsConfig, MetricsConfig, OpenLineageConfig
from cdc_assets.config.base import Section, revealed
from cdc_assets.config.collisions import (
    refuse_adoption,
    refuse_collisions,
    refuse_found,
    refuse_on_standby,
    refuse_shared_places,
)
from cdc_assets.config.groups.consumers import ConsumerConfig, named_apart
from cdc_assets.config.groups.lakes import LogConfig, refuse_beside_log
from cdc_assets.config.patterns import TablePattern
from cdc_assets.config.query.refused import refuse_in_query_mode
from cdc_assets.config.query.sections import QueryConfig
from cdc_assets.config.reading.documents import value_of
from cdc_assets.config.reading.expansion import Client, expanded, resolved
from cdc_assets.config.reading.explained import explained
from cdc_assets.config.sections import (
    BackfillsConfig,
    LakeConfig,
    MaintenanceConfig,
    MarkersConfig,
    MarksConfig,
    PostgresConfig,
    S3Config,
    SparkConfig,
    StagingConfig,
    StateConfig,
    VerifyConfig,
)
from cdc_assets.config.snapshot import PinBy, SnapshotConfig, Strategy
from cdc_assets.config.tables import AssetsConfig, Owner, TableConfig
from cdc_assets.errors import ConfigurationError
from cdc_assets.masks import Mask
from cdc_assets.messages.texts import meant
from cdc_assets.postgres.names import TableId
from cdc_assets.process.home import home

_SALT_CHARACTERS = 16
_NAMED = 10  # tables of a source, to whoever has named none of them
_NAME = re.compile(r"\A[a-z][a-z0-9_]{0,39}\Z")


class SourceConfig(Section):
    """One source database and the lake it is replicated into."""

    name: str
    """Of the source: its slot, its assets and, by default, its namespace in the lake have it."""
    postgres: PostgresConfig
    slot: str = ""
    """The replication slot; by default cdc_<name>."""
    publication: str = ""
    """The publication; by default cdc_<name>. With log: that of the other source."""
    query: QueryConfig | None = None
    """Query mode, for a source that can't be decoded: changes are found by queries."""
    log: LogConfig | None = None
    """A second lake: changes are those that another source has staged."""
    tables: tuple[TableConfig, ...]
    """What is replicated: names, patterns, or mappings with settings."""
    patterns: tuple[TableConfig, ...] = ()
    """The entries of ``tables`` that stand for several; ``setup.discovery`` finds theirs."""
    exclude: tuple[str, ...] = ()
    """Names and patterns of tables that no pattern of ``tables`` stands for."""
    mask_salt: SecretStr | None = None
    """What columns.mask: sha256 puts before each value, so that nobody can find values by hashing
    guesses: at least 16 characters, best ${CDC_MASK_SALT}. Another salt makes other hashes."""
    owners: tuple[Owner, ...] = ()
    """Who looks after it, for the asset catalog: team:data, or an address of mail."""
    assets: AssetsConfig = AssetsConfig()
    snapshot: SnapshotConfig = SnapshotConfig()
    staging: StagingConfig = StagingConfig()
    state: StateConfig = StateConfig()
    lake: LakeConfig = LakeConfig()
    materializer: Literal["follow", "run"] = "follow"
    """follow: a sensor keeps a process that merges; run: it asks for runs that do."""
    s3: S3Config = S3Config()
    spark: SparkConfig = SparkConfig()
    metrics: MetricsConfig = MetricsConfig()
    maintenance: MaintenanceConfig = MaintenanceConfig()
    verify: VerifyConfig = VerifyConfig()
    marks: MarksConfig = MarksConfig()
    markers: MarkersConfig = MarkersConfig()
    backfills: BackfillsConfig = BackfillsConfig()
    consumers: Annotated[tuple[ConsumerConfig, ...], AfterValidator(named_apart)] = ()
    """Programs that read the log beside the lake (docs/operate/consumers.md)."""
    alerts: AlertsConfig = AlertsConfig()
    openlineage: OpenLineageConfig | None = None
    """null: no events."""

    @model_validator(mode="before")
    @classmethod
    def _environment(cls, data: Any, info: ValidationInfo) -> Any:
        # A parent hands down an expanded configuration: a password may have "${…}" in it.
        if (info.context or {}).get("expanded"):
            return data
        refuse_found(data)
        return expanded(data, (info.context or {}).get("secrets"))

    @field_validator("tables")
    @classmethod
    def _some(cls, value: tuple[TableConfig, ...]) -> tuple[TableConfig, ...]:
        if not value:
            raise ValueError("name at least one, or a pattern like public.*")
        return value

    @field_validator("exclude")
    @classmethod
    def _are_patterns(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(TablePattern.parse(text).text for text in value)

    @field_validator("name")
    @classmethod
    def _word(cls, value: str) -> str:
        if not _NAME.match(value):
            raise ValueError(
                "write up to 40 lower-case letters, digits and underscores, beginning with a letter"
            )
        return value

    @model_validator(mode="after")
    def _defaults_and_collisions(self) -> Self:
        refuse_beside_log(self)
        refuse_in_query_mode(self)
        if self.query is None:
            object.__setattr__(self, "slot", self.slot or f"cdc_{self.name}")
            object.__setattr__(self, "publication", self.publication or f"cdc_{self.log_name}")
        if self.query is None and not re.fullmatch(r"[a-z0-9_]{1,63}", self.slot):
            raise ValueError("slot: Postgres allows lower-case letters, digits and underscores")
        patterns = [table for table in self.tables if table.pattern is not None]
        if patterns:
            if self.postgres.embedded:
                raise ValueError("tables: name each table of an embedded Postgres")
            named = tuple(table for table in self.tables if table.pattern is None)
            object.__setattr__(self, "tables", named)
            object.__setattr__(self, "patterns", tuple(patterns))
        refuse_collisions(self)
        refuse_adoption(self)
        return self

    @field_validator("mask_salt")
    @classmethod
    def _long(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and len(value.get_secret_value()) < _SALT_CHARACTERS:
            raise ValueError(
                f"at least {_SALT_CHARACTERS} characters; openssl rand -hex 32 makes some"
            )
        return value

    @model_validator(mode="after")
    def _salted(self) -> Self:
        for table in self.tables:
            if self.mask_salt is None and "sha256" in table.columns.mask.values():
                raise ValueError(
                    f"mask_salt: missing; {table.name} has a column with mask sha256. Make one"
                    " (openssl rand -hex 32), keep it, and write mask_salt: ${CDC_MASK_SALT}"
                )
        return self

    @model_validator(mode="after")
    def _apart(self) -> Self:
        refuse_shared_places(self)
        refuse_on_standby(self)
        return self

    @property
    def namespace(self) -> str:
        """That of lake tables which name none of their own."""
        return self.lake.namespace or self.name

    @property
    def namespaces(self) -> frozenset[str]:
        """All in which it has lake tables."""
        return frozenset({self.namespace, *(t.namespace for t in self.tables if t.namespace)})

    @property
    def salt(self) -> bytes:
        """What masks are salted with."""
        return self.mask_salt.get_secret_value().encode() if self.mask_salt is not None else b""

    def masks(self, table: TableId) -> dict[str, Mask] | None:
        """The masks of a table's columns, by name; None if the table isn't configured."""
        if (named := self._by_id.get(table)) is None:
            return None
        return {name: Mask.of(kind, self.salt) for name, kind in named.columns.mask.items()}

    @cached_property
    def row_filters(self) -> Mapping[TableId, str]:
        """What ``where`` has, of the tables that have it; cached, as each of thousands asks."""
        return {table.id: table.where for table in self.tables if table.where is not None}

    @property
    def streams(self) -> bool:
        """Whether a table's changes are followed; else it is copied, once."""
        return self.snapshot.mode != "snapshot_only"

    @property
    def publishes(self) -> bool:
        """Whether they are those of a publication; else they are queried, if followed."""
        return self.streams and self.query is None

    @property
    def decodes(self) -> bool:
        """Whether they come from a slot of its own; else they are queried, or another's."""
        return self.publishes and self.log is None

    @property
    def log_name(self) -> str:
        """Of the source whose staged files its log has: its own, or the one that ``log`` names."""
        return self.name if self.log is None else self.log.of

    @cached_property
    def staging_uri(self) -> str:
        return self.staging.uri or (home() / self.log_name / "staging").as_uri()

    @cached_property
    def warehouse(self) -> str:
        if self.lake.catalog.warehouse is not None:
            return self.lake.catalog.warehouse.rstrip("/")
        # Not as_uri(): neither Hadoop nor pyiceberg would turn a %20 back into a space. pyiceberg
        # takes text after # or ? for another part of the URI.
        folder = str(home() / self.name / "warehouse")
        if "#" in folder or "?" in folder:
            raise ConfigurationError(
                f"lake.catalog.warehouse: by default lake tables are in {folder}, and no folder of"
                " theirs may have # or ? in its name.",
                "Set CDC_ASSETS_HOME to another folder, or lake.catalog.warehouse.",
            )
        return f"file://{folder}"

    def dump(self) -> str:
        """The configuration as a line of JSON, secrets included: for a child's pipe, not a file."""
        return self._dumped

    @cached_property
    def _dumped(self) -> str:
        return json.dumps(revealed(self.model_dump(mode="python", by_alias=True)))

    def lake_name(self, table: TableId) -> str:
        """The table's name in the lake: ``as``, or its own, with the schema if it is not alone."""
        named = self._by_id.get(table)
        if named is not None and named.as_ is not None:
            return named.as_
        alike = self._names[table.name.lower()]
        name = f"{table.schema}_{table.name}" if alike > 1 else table.name
        return self.lake.called(name)

    def lake_identifier(self, table: TableId) -> tuple[str, str]:
        """Namespace and name of a table in the lake."""
        named = self._by_id.get(table)
        own = named.namespace if named is not None else None
        return own or self.namespace, self.lake_name(table)

    @cached_property
    def _names(self) -> Counter[str]:
        """Number of tables by name, ignoring case; cached, as thousands of tables use it."""
        return Counter(t.id.name.lower() for t in self.tables if not t.found)

    @cached_property
    def _by_id(self) -> dict[TableId, TableConfig]:
        return {table.id: table for table in self.tables}

    def strategy(self, table: TableId) -> Strategy:
        """How the table's first copy is to be made, where it can be."""
        return self.table(table).strategy or self.snapshot.strategy

    def pin_by(self, table: TableId) -> PinBy:
        """What a pin of the table beside the stream is made with."""
        return self.table(table).pin or self.snapshot.pin

    def table(self, name: str | TableId) -> TableConfig:
        """The configured table of that SQL name; raises ConfigurationError if there is none."""
        try:
            wanted = TableId.parse(name) if isinstance(name, str) else name
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        if (found := self._by_id.get(wanted)) is not None:
            return found
        written = meant(wanted.name, sorted(t.id.name for t in self.tables))
        alike = [t.id for t in self.tables if t.id.name == written]
        if alike:
            best = min(alike, key=lambda table: (table.schema != wanted.schema, table))
            remedy = f"Did you mean {best}? Else add it under tables:."
        else:
            known = sorted(t.name for t in self.tables)
            more = f", and {len(known) - _NAMED:,} more" if len(known) > _NAMED else ""
            remedy = f"It has: {', '.join(known[:_NAMED])}{more}. Add it under tables:, or correct"
            remedy += " the name."
        raise ConfigurationError(
            f"table {wanted} is not in the configuration of source {self.name}.", remedy
        )


def parse_config(
    data: object, origin: str, *, expanded: bool = False, secrets: Client | None = None
) -> SourceConfig:
    """Validate what was read from ``origin``; raises ConfigurationError naming key and remedy.

    ``expanded``: references were replaced already. ``secrets``: how AWS Secrets Manager is reached.
    """
    if isinstance(data, Mapping) and set(data) >= {"type", "attributes"}:
        data = data["attributes"]  # a component's defs.yaml works as a plain file too
    if not isinstance(data, Mapping):
        raise ConfigurationError(f"{origin}: expected a mapping with name, postgres and tables.")
    try:
        return SourceConfig.model_validate(data, context={"expanded": expanded, "secrets": secrets})
    except ValidationError as error:
        found = error.errors(include_url=False)
        lines = [f"{origin}: {explained(item, SourceConfig, data)}" for item in found]
        raise ConfigurationError("\n".join(lines)) from None


def config_from_parent(line: str) -> SourceConfig:
    """The configuration that a parent process handed down by :meth:`SourceConfig.dump`."""
    if not line:
        raise ConfigurationError("--config FILE is missing:", "no parent process sent one.")
    return parse_config(json.loads(line), "the parent process", expanded=True)


def load_config(path: str | os.PathLike[str]) -> SourceConfig:
    """Read a YAML or JSON file; raises ConfigurationError for whatever is wrong with it."""
    origin = os.fspath(path)
    return parse_config(resolved(value_of(Path(path)), origin), origin)
