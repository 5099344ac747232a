"""Dagster's names for a table: asset keys, partitions, operations. Pure functions of configuration.

Invariant: keys are stable and unique. Dagster derives operation names from keys, so a part of a key
may hold letters, digits and underscores only. Other characters become underscores; where two tables
of a source would then collide, the one that had to be changed gets a short hash of its SQL name.
Dagster joins the parts by two underscores, so ``a__b.c`` and ``a.b__c`` collide, too.
The metadata ``dagster/table_name`` has the true name.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import dagster as dg

from cdc_assets.config.source import SourceConfig
from cdc_assets.messages.texts import described
from cdc_assets.postgres.names import TableId

_FOREIGN = re.compile(r"[^A-Za-z0-9_]")


def plain(text: str) -> str:
    """``text`` with an underscore for every character that Dagster refuses in a name."""
    return _FOREIGN.sub("_", text)


# Dagster joins a key's parts by two underscores: these may be of one part, or of an edge.
_JOINS = re.compile(r"__|_\.|\._")


def _joined(table: TableId) -> str:
    return f"{plain(table.schema)}__{plain(table.name)}"


def _distinct(text: str, table: TableId) -> str:
    """A name with a hash, for a ``table`` whose plain name is another table's, too."""
    return f"{plain(text)}_{hashlib.sha256(str(table).encode()).hexdigest()[:6]}"


def health_key(config: SourceConfig) -> dg.AssetKey:
    """The key of the source's report on itself."""
    return dg.AssetKey([*config.assets.key_prefix, "health", config.name])


def marks_key(config: SourceConfig) -> dg.AssetKey:
    """The key of the source's marks."""
    return dg.AssetKey([*config.assets.key_prefix, "marks", config.name])


def marks_partitions_name(config: SourceConfig) -> str:
    return f"marks/{config.name}"


def marks_partitions(config: SourceConfig) -> dg.DynamicPartitionsDefinition:
    """The names of the marks that Dagster made."""
    return dg.DynamicPartitionsDefinition(name=marks_partitions_name(config))


@dataclass(frozen=True)
class TableAssets:
    """The names of one table's assets; what sensors ask for at each tick is made once."""

    config: SourceConfig
    table: TableId

    def _path(self, kind: str) -> dg.AssetKey:
        return dg.AssetKey([*self.config.assets.key_prefix, kind, self.config.name, *self._parts])

    @cached_property
    def _parts(self) -> tuple[str, str]:
        schema, name = self.table.schema, self.table.name
        shown = plain(schema), plain(name)
        # Looking at all others for each table is dear, so it is done only where it may matter.
        changed = shown != (schema, name)
        if not changed and not _JOINS.search(f"{schema}.{name}"):
            return shown
        alike = [
            t.id
            for t in self.config.tables
            if t.id != self.table and _joined(t.id) == "__".join(shown)
        ]
        # One that keeps its name keeps it, or the one whose schema is the shortest.
        first = not changed and not any(
            (plain(t.schema), plain(t.name)) == (t.schema, t.name) and len(t.schema) < len(schema)
            for t in alike
        )
        if not alike or first:
            return shown
        if shown[1] != name or not changed:
            return shown[0], _distinct(name, self.table)
        return _distinct(schema, self.table), shown[1]

    @cached_property
    def source(self) -> dg.AssetKey:
        return self._path("postgres")

    @cached_property
    def snapshot(self) -> dg.AssetKey:
        return self._path("snapshot")

    @cached_property
    def staged_log(self) -> dg.AssetKey:
        return self._path("staged_log")

    @property
    def first_log(self) -> dg.AssetKey | None:
        """Of a second lake: the staged log of the first, whose keys begin as its own do."""
        if (log := self.config.log) is None:
            return None
        first = self.config.model_copy(update={"name": log.of, "log": None})
        return TableAssets(first, self.table).staged_log

    @cached_property
    def lake(self) -> dg.AssetKey:
        namespace, name = self.config.lake_identifier(self.table)
        shown = plain(name)
        if shown != name and any(
            (of, plain(other)) == (namespace, shown)
            for of, other in (
                self.config.lake_identifier(t.id) for t in self.config.tables if t.id != self.table
            )
        ):
            shown = _distinct(name, self.table)
        return dg.AssetKey([*self.config.assets.key_prefix, namespace, shown])

    @cached_property
    def maintenance(self) -> dg.AssetKey:
        return self._path("maintenance")

    @property
    def keys(self) -> tuple[dg.AssetKey, ...]:
        """All of the table's assets."""
        return self.source, self.snapshot, self.staged_log, self.lake, self.maintenance

    @property
    def lake_table_name(self) -> str:
        """The Iceberg table as a person writes it."""
        return ".".join(self.config.lake_identifier(self.table))

    @property
    def partitions_name(self) -> str:
        return f"ctid/{self.config.name}.{self.table.schema}.{self.table.name}"

    @property
    def partitions(self) -> dg.DynamicPartitionsDefinition:
        return dg.DynamicPartitionsDefinition(name=self.partitions_name)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is merged into the table by itself at this time of the day."""
        return self.config.table(self.table).freshness.quiet_seconds(datetime.now(UTC)) > 0

    @property
    def owners(self) -> tuple[str, ...]:
        """The owners that the asset catalog names: the table's own, else the source's."""
        own = self.config.table(self.table).owners
        return self.config.owners if own is None else own

    def spec(
        self,
        key: dg.AssetKey,
        kinds: set[str],
        description: str,
        metadata: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> dg.AssetSpec:
        """An asset of the table, in the group of its kind, with its owners and tags."""
        assets, table = self.config.assets, self.config.table(self.table)
        group = table.group or assets.group or self.config.name
        health = dg.MetadataValue.asset(health_key(self.config))
        return dg.AssetSpec(
            key,
            # A table's assets have one name at their end, by which a list of a group shows them.
            group_name=group if key == self.lake else f"{group}_{key.path[-4]}",
            owners=self.owners,
            kinds=kinds,
            tags={**assets.tags, **table.tags},
            description=described(description),
            metadata={**(metadata or {}), "health": health},
            **more,
        )


def failed_tag(tables: Iterable[object]) -> dict[str, str]:
    """The tag of a run that couldn't do ``tables``; the sensors leave those alone for a while."""
    named = json.dumps([str(table) for table in tables])
    return {FAILED_TAG: named if len(named) <= _TAG_LIMIT else "null"}


def all_tables(config: SourceConfig) -> list[TableAssets]:
    """The names of every configured table, in the configuration's order."""
    return [TableAssets(config, table.id) for table in config.tables]


# Tags of the runs that the sensors ask for and look for.
SOURCE_TAG, WORK_TAG, TABLE_TAG = "cdc_assets/source", "cdc_assets/work", "cdc_assets/table"
# TABLE_TAG of a run that copies several.
SEVERAL = "several tables"
# The tables that a run couldn't do, as JSON; null: so many that they don't fit.
FAILED_TAG = "cdc_assets/failed_tables"
# Dagster's index of tags on Postgres takes some 2,700 bytes.
_TAG_LIMIT = 2_000
# Dagster's, of the partitions that a run is asked for: one, or all from one to another.
PARTITION_TAG = "dagster/partition"
RANGE_START_TAG, RANGE_END_TAG = (
    "dagster/asset_partition_range_start",
    "dagster/asset_partition_range_end",
)
# The kinds of work of these runs.
WORKS = ("backfill", "check", "maintain", "mark", "materialize", "ready", "sample", "snapshot")


def run_tags(config: SourceConfig, work: str, table: TableId | None = None) -> dict[str, str]:
    """The tags by which a sensor recognises its own runs."""
    tags = {SOURCE_TAG: config.name, WORK_TAG: work}
    return tags if table is None else {**tags, TABLE_TAG: str(table)}


def job_name(source: str, work: str) -> str:
    """The job of the runs of a kind of work."""
    if work == "snapshot":  # Dagster's own: no other holds assets partitioned in different ways
        return "__ASSET_JOB"
    return f"{'check' if work == 'ready' else work}_{source}_tables"


# What a source has a sensor for.
SENSORS = (
    "backfills",
    "cdc_alerts",
    "checks",
    "flusher",
    "health",
    "materializer",
    "openlineage",
    "services",
    "snapshot",
)


def sensor_names(source: str) -> frozenset[str]:
    """The names of the source's sensors."""
    return frozenset(sensor_name(source, what) for what in SENSORS)


def sensor_name(source: str, what: str) -> str:
    """The source's sensor for ``what``, one of :data:`SENSORS`."""
    return f"{what}_{source}"


def of_source(config: SourceConfig, what: str) -> dict[str, Any]:
    """The name of the source's sensor for ``what``, and the tag by which it is told from others."""
    return {"name": sensor_name(config.name, what), "tags": {SOURCE_TAG: config.name}}


def operation_name(source: str, work: str) -> str:
    """A source's operation. A job, with one underscore there, can't have the same name."""
    return f"{work}__{source}"


def run_lock(run_id: str) -> str:
    """The name of the lock in Postgres that a run holds while it works."""
    return f"run:{run_id}"
