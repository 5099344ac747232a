"""A table of the lake: its definition, and the copy and the cursor that its snapshots record.

Keeps invariants 6 and 7: the summary of a commit names the chunks that it lands, and they are read
back from there. So is the cursor (``lineage``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product

from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyspark.sql import SparkSession

from cdc_assets.config import layout
from cdc_assets.config.source import SourceConfig
from cdc_assets.config.tables import TableConfig
from cdc_assets.errors import TableProblem, first_line
from cdc_assets.lake import place as lake_place
from cdc_assets.lake.catalog.catalog import CATALOG, open_catalog, reached
from cdc_assets.lake.catalog.place import forgetting
from cdc_assets.lake.columns import PROPERTY, TableColumns
from cdc_assets.lake.lineage import cursor_properties, may_have_rows
from cdc_assets.lake.spark.sql import listed, quoted, ticked
from cdc_assets.lake.state import LakeState, lake_state
from cdc_assets.log.cursors import Cursor
from cdc_assets.log.staged.places import ForeignPath
from cdc_assets.log.table_row import TableRow
from cdc_assets.masks import Mask
from cdc_assets.messages.texts import command
from cdc_assets.postgres.catalog import Column
from cdc_assets.postgres.names import lake_column, safe_folder
from cdc_assets.postgres.types import Policy, TypeMapping, mapping

# A batch's column has to fit into one Arrow vector, which grows by doubling to less than 2 GB:
# values of 10 MB do. A scan of narrow rows costs no more than with Iceberg's 5,000.
READING = {"read.parquet.vectorization.batch-size": "100"}
_MANIFESTS = "commit.manifest.min-count-to-merge"
RETRIES = "commit.retry.num-retries"
# Table properties: the source, its table and, until the copy is complete, the copy under way.
SOURCE, TABLE, COPYING = "cdc.source", "cdc.table", "cdc.copying"


@dataclass(frozen=True, slots=True)
class LakeColumn:
    """A column on its way from Postgres into the lake, where its name is ``name``."""

    name: str
    source: Column
    mapping: TypeMapping
    policy: Policy
    is_key: bool
    mask: Mask | None = None

    def masked(self, text: str | None) -> str | None:
        """What of a text of the source's column may be in the lake."""
        return text if self.mask is None else self.mask.text(text)


@dataclass(frozen=True)
class LakeTable:
    """One replicated table as Spark and pyiceberg know it."""

    config: SourceConfig
    table: TableConfig
    row: TableRow
    suffix: str = ""
    columns: tuple[LakeColumn, ...] = field(init=False)

    def __post_init__(self) -> None:
        found = [c for c in self.row.columns if c.name not in self.table.columns.exclude]
        object.__setattr__(self, "columns", tuple(self._column(c) for c in found))

    def _column(self, column: Column) -> LakeColumn:
        rules, is_key = self.table.columns, column.name in self.row.key_columns
        rule = self.row.mask_rule(column)
        as_text = rule is not None or column.number in self.row.text_numbers
        found = mapping(column.type, "string" if as_text else rules.types.get(column.name))
        # Two keys with one value in the lake would be duplicate rows.
        policy = "fail" if is_key and found.fits is not None else rules.unrepresentable
        mask = Mask.of_rule(rule, self.config.salt) if rule is not None else None
        name = lake_column(column.name, rules.rename)
        return LakeColumn(name, column, found, policy, is_key, mask)

    @property
    def key(self) -> tuple[LakeColumn, ...]:
        """The key's columns in the key's order; empty for a table without one."""
        by_name = {c.source.name: c for c in self.columns}
        return tuple(by_name[name] for name in self.row.key_columns)

    @property
    def extra(self) -> Mapping[str, str]:
        """The columns that its mode and metadata add, with their Spark SQL types."""
        return self.table.added_columns(self.row.mode)

    @property
    def name(self) -> str:
        return self.config.lake_name(self.row.table) + self.suffix

    @property
    def identifier(self) -> tuple[str, str]:
        """For pyiceberg."""
        return (self.namespace, self.name)

    @property
    def namespace(self) -> str:
        return self.config.lake_identifier(self.row.table)[0]

    @property
    def location(self) -> str | None:
        """The location of a new table's files; None where the catalog chooses it."""
        if self.config.lake.catalog.type != "sql":
            return None
        return f"{self.config.warehouse}/{self.namespace}/{safe_folder(self.name)}"

    @property
    def sql_name(self) -> str:
        """For Spark SQL: catalog, namespace and table."""
        return f"{CATALOG}.{ticked(self.namespace)}.{ticked(self.name)}"

    @property
    def procedure_name(self) -> str:
        """For Iceberg's procedures: a string literal, parsed as an identifier on the other side."""
        # With the catalog's name: a namespace may be called like a catalog.
        text = self.sql_name
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    def branch(self, branch: str) -> str:
        """For Spark SQL: the table as of a branch."""
        return f"{self.sql_name}.branch_{branch}"

    def create(self, session: SparkSession) -> None:
        """Create namespace and table where they don't exist yet, with a first, empty snapshot.

        The snapshot names no cursor: a late one on ``main`` would take the cursor back.
        """
        self._create(session, self.table.partition_by, self.creation_properties())
        if self.state().snapshot_id is None:
            # A draft begins with a snapshot (lake.publish); an empty one will do.
            session.table(self.sql_name).limit(0).writeTo(self.sql_name).append()

    def reached(self, cursor: Cursor, foreign: str | None = None) -> dict[str, str]:
        """The summary properties of the last commit of a change up to ``cursor`` (invariant 7)."""
        return cursor_properties(cursor, self.row.epoch, foreign)

    @property
    def copy_id(self) -> str:
        """The copy's id, which no other copy has, even in a coordination schema made anew."""
        return f"{self.row.table}@{self.row.epoch}:{self.row.snapshot_lsn}"

    def upgrade(self, session: SparkSession, loaded: Table) -> None:
        """Give the table, as it was ``loaded``, the properties that it is configured with.

        A table that was made for its copy has others.
        """
        wanted = self.properties_after(loaded)
        found = {**loaded.properties, "format-version": str(loaded.metadata.format_version)}
        other = [k for k in ("format-version", "write.delete.mode") if found.get(k) != wanted[k]]
        if not other:  # whoever set another number of manifests knows why
            wanted = {_MANIFESTS: wanted[_MANIFESTS]} if _MANIFESTS not in found else {}
        if wanted:
            session.sql(f"alter table {self.sql_name} set tblproperties ({listed(wanted)})")

    def _create(
        self, session: SparkSession, partition_by: Sequence[str], properties: Mapping[str, str]
    ) -> None:
        open_catalog(self.config)  # makes a SQL catalog's own tables
        types = {c.name: c.mapping.lake for c in self.columns} | dict(self.extra)
        columns = ", ".join(f"{ticked(name)} {lake}" for name, lake in types.items())
        session.sql(f"create namespace if not exists {CATALOG}.{ticked(self.namespace)}")
        session.sql(
            f"create table if not exists {self.sql_name} ({columns})"
            f" {self.clauses(partition_by, properties)}"
        )

    def clauses(self, partition_by: Sequence[str], properties: Mapping[str, str]) -> str:
        """The clauses that follow the columns in CREATE TABLE."""
        fields = ", ".join(layout.parse_part(text).sql for text in partition_by)
        parts = f" partitioned by ({fields})" if fields else ""
        place = f" location {quoted(self.location)}" if self.location is not None else ""
        return f"using iceberg{parts}{place} tblproperties ({listed(properties)})"

    def properties(self) -> dict[str, str]:
        """The table properties that it is configured with."""
        version = self.config.lake.format_version
        mode = "merge-on-read" if version >= 3 else "copy-on-write"
        return {
            "format-version": str(version),
            "write.delete.mode": mode,
            "write.merge.mode": mode,
            "write.update.mode": mode,
            "write.parquet.compression-codec": "zstd",
            **READING,
            # Each commit writes metadata.json anew and lists the older ones in it: keep few.
            "write.metadata.delete-after-commit.enabled": "true",
            "write.metadata.previous-versions-max": "20",
            # A merge adds two manifests and reads all; Iceberg would leave a hundred of them.
            _MANIFESTS: "10",
            # Iceberg's own number. Copies by earlier versions left none.
            RETRIES: "4",
            SOURCE: self.config.name,
            TABLE: str(self.row.table),
        }

    def properties_after(self, loaded: Table) -> dict[str, str]:
        """:meth:`properties` where the table is there: Iceberg takes no format version back."""
        version = str(max(loaded.format_version, self.config.lake.format_version))
        return {**self.properties(), "format-version": version}

    def creation_properties(self) -> dict[str, str]:
        """The table properties that it is created with."""
        return {
            **self.properties(),
            PROPERTY: self.described().dump(),
            layout.PROPERTY: layout.described(self.table.partition_by, ()),
        }

    def described(self, schema: Schema | None = None) -> TableColumns:
        """The column record of a table that is made now, with the field ids of ``schema``."""
        rules = self.table.columns
        ids = {f.name: f.field_id for f in schema.fields} if schema is not None else {}
        return TableColumns(
            self.row.columns,
            self.row.key_columns,
            {c.source.number: ids[c.name] for c in self.columns if c.name in ids},
            exclude=rules.exclude,
            types=rules.types,
        )

    def telling(self) -> list[LakeColumn]:
        """The columns that distinguish rows of a table without a key.

        The lake doesn't know the values of ``unknown`` columns in older rows. The source has
        dropped those columns, so rows that differ in them alone are the same there.
        """
        loaded = self.load()
        unknown = self.recorded(loaded).unknown if loaded is not None else ()
        return [c for c in self.columns if c.source.number not in unknown]

    def recorded(self, loaded: Table) -> TableColumns:
        """The table's own record of its columns; for an older version's table, the log's."""
        text = loaded.properties.get(PROPERTY)
        if text is None:
            return TableColumns(self.row.columns, self.row.key_columns)
        return TableColumns.parse(text)

    def is_made_by_us(self, loaded: Table) -> bool:
        """Whether its properties say that this source made it, from this very table."""
        said = loaded.properties.get(SOURCE), loaded.properties.get(TABLE)
        return said == (self.config.name, str(self.row.table))

    def load(self) -> Table | None:
        """The table through pyiceberg, None if it doesn't exist.

        Raises TableProblem if the catalog leads to a metadata file that isn't there, or isn't where
        the table's has to be, and EnvironmentProblem if a SQL catalog is away.
        """
        try:
            with reached():
                loaded = open_catalog(self.config).load_table(self.identifier)
            lake_place.check(self, loaded)
        except NoSuchTableError:
            return None
        except ForeignPath as error:
            raise lake_place.misled(self, error.what) from error
        except FileNotFoundError as error:
            raise TableProblem(
                self.row.table,
                f"the catalog leads its lake table {self.sql_name} to a file that isn't there (it"
                f" was restored from a backup, or somebody removed the file): {first_line(error)}",
                f"See that the warehouse can be reached. If the file is gone for good:"
                f" {forgetting(self.config, self.identifier)}; then cdc-assets resync"
                f" '{self.row.table}'",
            ) from error
        return loaded

    def loaded(self) -> Table:
        """:meth:`load` of a table that must exist; raises TableProblem if it doesn't."""
        if (loaded := self.load()) is None:
            raise self.gone()
        return loaded

    def gone(self, former: str | None = None) -> TableProblem:
        """The problem of a table that was there, and isn't in the catalog under its name.

        ``former``: the name that it has there, "" if it was looked for and not found.
        """
        if former := self._former_name() if former is None else former:
            namespace, _, name = former.rpartition(".")
            setting = f"as: {name}" if namespace == self.namespace else "as:, namespace:"
            return TableProblem(
                self.row.table,
                f"its lake table is called {former}, and the configuration calls it {self.name}"
                " now (as:, or a pattern of another schema, or another table of its name)",
                f"Give it its name back ({setting}, or lake.prefix), or have it copied under the"
                f" new one: {command('resync', self.row.table)}",
            )
        return TableProblem(
            self.row.table,
            f"its lake table {self.sql_name} is gone from the catalog",
            "Restore it in the catalog, or have the table copied again.",
        )

    def _former_name(self) -> str | None:
        """The name of a lake table that was made for this one; the likely ones are tried."""
        catalog, table = open_catalog(self.config), self.row.table
        plain = {table.name, f"{table.schema}_{table.name}"}
        names = {self.name, *plain, *(f"{self.config.lake.prefix}{name}" for name in plain)}
        spaces = {*self.config.namespaces, self.config.name}
        for place in sorted({*product(spaces, names)} - {self.identifier}):
            with suppress(NoSuchNamespaceError, NoSuchTableError, OSError):
                found = catalog.load_table(place)
                if self.is_made_by_us(found) and COPYING not in found.properties:
                    return ".".join(place)
        return None

    def state(self) -> LakeState:
        """Read copy, landed chunks and cursor from the ancestors of the current snapshot."""
        return lake_state(self.load())

    def has_rows(self, state: LakeState) -> bool:
        """Whether there may be any row; False only if the table provably has no data file."""
        loaded = self.load() if state.total_rows <= 0 else None
        return state.total_rows > 0 or (loaded is not None and may_have_rows(loaded))
