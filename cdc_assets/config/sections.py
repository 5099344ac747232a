"""The sections of a source's configuration: their keys, defaults and limits.

Each is a pydantic model of one mapping in the YAML; ``config.SourceConfig`` is the whole of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, SecretStr, field_validator, model_validator

from cdc_assets.config.base import (
    Dsn,
    Duration,
    Namespace,
    Section,
    Size,
    TableText,
    place_uri,
    plain_place,
    readable_address,
)
from cdc_assets.postgres.names import TableId


class PostgresConfig(Section):
    """Where the source is: a DSN, or a throw-away Postgres that the platform runs itself."""

    dsn: Dsn | None = None
    """The address as libpq takes it, of the role that reads the tables."""
    replication_dsn: Dsn | None = None
    """Of the role that makes the slot and streams, where the one that reads may not replicate."""
    embedded: bool = False
    """Run a throw-away Postgres, in the runtime home."""
    version: Literal[16, 18] = 18
    """Major version of the embedded Postgres."""
    demo: bool = False
    """Fill the embedded Postgres with the demo tables and keep traffic on them."""
    standby: bool = False
    """``dsn`` is a hot standby's, from Postgres 16 on: slot and copies are there. The publication,
    which only the primary can have made, is made there by hand."""
    primary_dsn: Dsn | None = None
    """Of a standby's primary, where a role may have it say at once which transactions run
    (pg_log_standby_snapshot), which a slot on the standby waits for. Nothing else is done there."""

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if self.standby and self.embedded:
            raise ValueError("standby: true goes with dsn; an embedded Postgres is none")
        if self.primary_dsn is not None and not self.standby:
            raise ValueError("primary_dsn goes with standby: true; else the primary is dsn")
        if (self.dsn is None) == (not self.embedded):
            raise ValueError("give either dsn: postgresql://… or embedded: true")
        if self.demo and not self.embedded:
            raise ValueError("demo: true writes tables and traffic; it goes with embedded: true")
        if self.replication_dsn is not None and self.embedded:
            raise ValueError("replication_dsn goes with dsn; an embedded Postgres has one role")
        return self


class StagingConfig(Section):
    """Where changes wait as Parquet, and how often the flusher writes them."""

    uri: str | None = None
    """file:///folder or s3://bucket/prefix; by default a folder of the runtime home."""
    former_uris: tuple[str, ...] = ()
    """What ``uri`` was before: files of the log there are read, and removed in time."""
    flush_interval: Duration = timedelta(seconds=1)
    """How long a change waits at most before it is staged."""
    flush_bytes: Size = 64 * 10**6
    """Bytes of the stream after which is staged earlier."""

    @field_validator("uri")
    @classmethod
    def _scheme(cls, value: str | None) -> str | None:
        return place_uri(value) if value else value

    @field_validator("former_uris")
    @classmethod
    def _schemes(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(place_uri, value))

    @property
    def flush_interval_seconds(self) -> float:
        return self.flush_interval.total_seconds()


class StateConfig(Section):
    """The coordination database; by default the source itself."""

    postgres_url: Dsn | None = None
    """The address of another database for it."""
    schema_: Annotated[str, Field(alias="schema", pattern=r"^[a-z_][a-z0-9_]{0,62}$")] = (
        "_pg2iceberg"
    )
    """Its schema there."""


# What the rest of the configuration decides.
_CATALOG_OURS = frozenset(
    {"type", "catalog-impl", "uri", "warehouse", "cache-enabled", "py-catalog-impl", "py-io-impl"}
)


class CatalogConfig(Section):
    """The Iceberg catalog; by default SQL tables in the coordination database."""

    type: Literal["sql", "rest", "glue"] = "sql"
    """sql: tables in a Postgres. rest: a server. glue: AWS Glue."""
    uri: SecretStr | None = None
    """Of a REST catalog, or of another database for the SQL catalog."""
    warehouse: str | None = None
    """Where tables are made: file:///folder or s3://bucket/prefix, or a REST catalog's name of it;
    by default a folder of the runtime home."""
    properties: Mapping[str, SecretStr] = Field(default_factory=dict)
    """More properties of a rest or glue catalog, as Iceberg calls them, for Spark and pyiceberg
    alike: credential, token, scope, oauth2-server-uri, rest.sigv4-enabled, header.…; secrets best
    as ${VAR}."""
    locations: tuple[str, ...] = ()
    """Where tables may lie beside ``warehouse``: an earlier one, or a table's own location."""

    @field_validator("warehouse")
    @classmethod
    def _plain(cls, value: str | None) -> str | None:
        # A REST catalog's may be a name, and Hadoop and pyiceberg know other stores.
        if value is not None and value.startswith(("file:", "s3:")):
            plain_place(value)
        return value

    @field_validator("locations")
    @classmethod
    def _schemes(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(place_uri, value))

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.type == "rest" and self.uri is None:
            raise ValueError("a rest catalog needs uri: https://…")
        if self.type != "sql" and self.uri is not None and "?" in self.uri.get_secret_value():
            raise ValueError("uri: write the address without parameters: errors repeat those")
        if self.type == "sql" and self.uri is not None:
            readable_address(
                SecretStr(self.uri.get_secret_value().replace("postgresql+psycopg:", "postgresql:"))
            )
        if self.properties and self.type == "sql":
            raise ValueError("properties: a rest or glue catalog has some, the SQL catalog none")
        if ours := sorted(_CATALOG_OURS & self.properties.keys()):
            raise ValueError(f"properties: {ours[0]} follows from the other settings; remove it")
        if self.type == "glue" and self.warehouse is None:
            raise ValueError("a glue catalog needs warehouse: s3://bucket/prefix")
        return self

    def takes(self, name: str) -> bool:
        """Whether a table may be called so: in Glue, Spark refuses what pyiceberg makes."""
        skips = self.properties.get("glue.skip-name-validation") == SecretStr("true")
        return self.type != "glue" or skips or re.fullmatch("[a-z0-9_]{1,255}", name) is not None


class LakeConfig(Section):
    """Where the tables end up."""

    namespace: Namespace | None = None
    """Of all its tables; by default the source's name."""
    prefix: Annotated[str, Field(max_length=32, pattern=r"^[a-z0-9_]*$")] = ""
    """Before the name of each lake table that as: doesn't name: eu_, where several sources of one
    form share a namespace."""
    format_version: Literal[2, 3] = 3
    """Iceberg's: 3 has deletion vectors, 2 is without any delete files."""
    max_parallel_tables: Annotated[int, Field(ge=1, le=64)] = 2
    """Tables that one worker merges at once."""
    merge_bytes: Size = 64 * 10**6
    """Staged bytes that one merge takes at most; compressed, so about ten times as much parsed."""
    catalog: CatalogConfig = CatalogConfig()

    def called(self, name: str) -> str:
        """The lake table's name of a table that is called so, where ``as:`` doesn't say it."""
        whole = f"{self.prefix}{name}"
        return whole.lower() if self.catalog.type == "glue" else whole  # it knows no capitals


class S3Config(Section):
    """S3 settings, of staged files and of the lake's; keys come from the environment by default."""

    endpoint: str | None = None
    """The address of a store that isn't AWS's."""
    region: str | None = None
    """The region, where the environment doesn't say it."""
    path_style: bool = False
    """Whether buckets are in the path, and not in the host's name."""
    access_key_id: str | None = None
    """A key's id; by default AWS's clients find one: in AWS_… variables, a profile, a role."""
    secret_access_key: SecretStr | None = Field(default=None, repr=False)
    """Its secret, best as ${VAR} or ${aws-secret:…}."""
    session_token: SecretStr | None = None
    """Of a key that ends. Nothing renews it: a role that AWS's clients find is better."""

    @model_validator(mode="after")
    def _whole_key(self) -> Self:
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise ValueError("give access_key_id and secret_access_key, or neither")
        if self.session_token is not None and self.access_key_id is None:
            raise ValueError("session_token: goes with access_key_id")
        return self

    @property
    def key(self) -> dict[str, str]:
        """The key as Iceberg's properties have it; empty if there is none here."""
        if self.access_key_id is None or self.secret_access_key is None:
            return {}
        found = {
            "s3.access-key-id": self.access_key_id,
            "s3.secret-access-key": self.secret_access_key.get_secret_value(),
        }
        if self.session_token is not None:
            found["s3.session-token"] = self.session_token.get_secret_value()
        return found


_VALUE = r"(?:[^%/;=?#\s]|%[0-9A-Fa-f]{2})*"
_CONNECT = re.compile(rf"\Asc://[^/;?#\s]+(?:/;?|/(?:;[\w-]+={_VALUE})+)?\Z")


class SparkConfig(Section):
    """A local Connect server of ours, or the user's own cluster."""

    remote: str | None = Field(default=None, repr=False)  # it may carry a token
    """sc://host:15002 of a Spark Connect server of your own; by default a local one is run."""
    cores: Annotated[int, Field(ge=1, le=256)] = 2
    """Processors that the local server uses; tasks of a large merge, on a cluster, too."""
    memory: Annotated[str, Field(pattern=r"^[1-9][0-9]*[mg]$")] = "3g"
    """Heap of the local server: 512m, 3g."""
    conf: Mapping[str, str] = Field(default_factory=dict, repr=False)
    """Spark's own settings, which win over ours."""

    @field_validator("remote")
    @classmethod
    def _connect_url(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith("sc://"):
            raise ValueError("write a Spark Connect address: sc://host:15002")
        # PySpark would quote the address in an error, or send another token than was meant.
        if value is not None and not _CONNECT.match(value):
            raise ValueError(
                "write sc://host:15002/;name=value;… with letters, digits and . _ ~ - in values,"
                " of a token, too (openssl rand -hex 32), and all else as %2F and so on"
            )
        return value


def _dividing(value: timedelta | None) -> timedelta | None:
    """An interval that a cron line can say."""
    minutes = value.total_seconds() / 60 if value is not None else 60
    if minutes < 1 or not (60 % minutes == 0 or (minutes % 60 == 0 and 1440 % minutes == 0)):
        raise ValueError("write what divides an hour or a day evenly, like 15m, 1h or 6h")
    return value


Every = Annotated[Duration | None, AfterValidator(_dividing)]
"""How often a schedule runs; null: only by hand."""


class BackfillsConfig(Section):
    """How tables that stream are read again (cdc-assets backfill)."""

    readers: Annotated[int, Field(ge=1, le=32)] = 2
    """Sessions that read at once, each in transactions of about snapshot.hold_at_most."""
    signals: TableText | None = None
    """A table of the source, as in SQL, with columns id, type and data: its rows ask for backfills,
    as Debezium's signals do. No pattern of tables: stands for it."""


class VerifyConfig(Section):
    """How a part of each table is compared with the source, again and again."""

    every: Every = timedelta(hours=1)
    """How often; every 22 hours of a table that was compared whole and doesn't change. null: only
    by hand."""
    sample_rows: Annotated[int, Field(ge=1, le=10_000_000)] = 10_000
    """Rows of a table that one run compares, about."""
    fail_after: Duration = timedelta(days=1)
    """A table that couldn't be compared is a warning, and after so long a failure."""
    show_keys: bool = False
    """Messages, alerts and events name rows by their keys, and not only by a hash of them."""


class MarksConfig(Section):
    """Marks: tags of all lake tables at one position of the source (cdc-assets mark)."""

    every: Every = None
    """How often one is made by itself; null: only by hand. Its name is the time, as in UTC."""
    keep: Annotated[int, Field(ge=1, le=1_000)] = 7
    """So many of those are kept; marks that were made by hand stay until they are dropped."""


class MarkersConfig(Section):
    """Rows of a table ask for marks, which every deployment of the source makes at one commit."""

    table: TableText | None = None
    """A published table of the source, with columns marker and name: a row that is inserted makes
    the mark of that name where its transaction commits. No pattern of tables: stands for it."""

    @property
    def id(self) -> TableId | None:
        return None if self.table is None else TableId.parse(self.table)


class KeepSnapshotsConfig(Section):
    """Which snapshots of a lake table stay: the newest ``count``, and all younger than ``age``."""

    count: Annotated[int, Field(ge=1, le=10_000)] = 20
    """So many are kept in any case."""
    age: Duration = timedelta(hours=1)
    """How long a query may read a snapshot. At a merge every two seconds an hour is 2 MB of
    metadata, which each commit writes anew."""


class MaintenanceConfig(Section):
    """How lake tables and the log are kept healthy."""

    every: Every = timedelta(minutes=30)
    """How often; once a day of a table that doesn't change. null: only by hand."""
    target_file_size: Size = 128 * 10**6
    """How large compaction makes data files."""
    min_input_files: Annotated[int, Field(ge=2, le=1000)] = 5
    """So many small files of a partition are worth being rewritten into one."""
    deleted_rows: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """A file is rewritten once more than this share of its rows is deleted."""
    keep_snapshots: KeepSnapshotsConfig = KeepSnapshotsConfig()
    staged_grace: Duration = timedelta(days=1)
    """How long a staged file stays after every consumer group is past it."""
    orphan_grace: Duration = timedelta(days=3)
    """How old a file that nothing refers to has to be before it is removed."""
    keep_history: Annotated[Duration, Field(ge=timedelta(hours=1))] | None = timedelta(days=7)
    """How long Dagster remembers the runs and the checks of this source; null: for ever."""

    @field_validator("target_file_size")
    @classmethod
    def _at_least(cls, value: int) -> int:
        if value < 10**6:
            raise ValueError("at least 1MB: smaller files cost more than they hold")
        return value

    @field_validator("orphan_grace")
    @classmethod
    def _a_day(cls, value: timedelta) -> timedelta:
        if value < timedelta(days=1):
            raise ValueError("at least 1d: younger files may belong to a write under way")
        return value
