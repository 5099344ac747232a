"""The catalog of drafts (``lake.drafts``): a SQL catalog of another name, where no reader looks.

It is in the database of the lake's SQL catalog; beside Glue and REST catalogs, in the coordination
database. A table whose files a REST catalog's server alone opens has none there: it opens no
draft's.
"""

from __future__ import annotations

import logging
from typing import Any

from pyiceberg.catalog.sql import IcebergTables
from pyiceberg.exceptions import NoSuchTableError
from sqlalchemy import Engine, delete, insert, select
from sqlalchemy.orm import Session

from cdc_assets.config.sections import CatalogConfig
from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import CdcError
from cdc_assets.lake.catalog.catalog import CATALOG, open_catalog, spark_settings
from cdc_assets.lake.catalog.parsed import ParsedOnce

logger = logging.getLogger(__name__)

DRAFTS = "cdc_drafts"

# Beside another catalog merges go on without this one, so nobody waits for it for longer. The
# driver waits without end for what a server says, of its own accord.
_WAITS = {"loginTimeout": "10", "socketTimeout": "60"}

# What Iceberg opens a REST catalog's files with by default.
_ITS_FILES = "org.apache.iceberg.io.ResolvingFileIO"


def draft_settings(config: SourceConfig) -> dict[str, str]:
    """Session settings that make the catalog known to Spark; none where JDBC can't open it.

    Nor where the coordination database is away beside another catalog: it isn't the lake's.
    """
    settings, kind = spark_settings(config), config.lake.catalog.type
    prefix = f"spark.sql.catalog.{CATALOG}"
    if kind != "sql":
        try:
            settings |= spark_settings(_with_sql_catalog(config))
        except CdcError as error:
            logger.info("Spark gets no catalog of drafts: %s", error)
            return {}
        settings |= {f"{prefix}.jdbc.{key}": seconds for key, seconds in _WAITS.items()}
    if kind == "rest":
        settings.setdefault(f"{prefix}.io-impl", _ITS_FILES)
    return {f"spark.sql.catalog.{DRAFTS}{k.removeprefix(prefix)}": v for k, v in settings.items()}


def drafts_of(config: SourceConfig) -> Drafts | None:
    """The catalog's entries; None where there is none. Raises what ``open_catalog`` does."""
    catalog = open_catalog(_with_sql_catalog(config))
    return Drafts(catalog.engine) if isinstance(catalog, ParsedOnce) else None


def _with_sql_catalog(config: SourceConfig) -> SourceConfig:
    if config.lake.catalog.type == "sql":
        return config
    warehouse = config.lake.catalog.warehouse
    lake = config.lake.model_copy(update={"catalog": CatalogConfig(warehouse=warehouse)})
    return config.model_copy(update={"lake": lake})


class Drafts:
    """Entries of the catalog, each by its lake table's UUID and a name of its own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def add(self, table: str, name: str, metadata: str) -> None:
        """Add an entry, which is then the table's only one."""
        row = {"table_namespace": table, "table_name": name, "metadata_location": metadata}
        with Session(self._engine) as session:
            session.execute(delete(IcebergTables).where(*_of(table)))
            session.execute(insert(IcebergTables).values(catalog_name=DRAFTS, **row))
            session.commit()

    def led_to(self, table: str, name: str) -> str:
        """The place of a draft's metadata. Raises NoSuchTableError."""
        found = select(IcebergTables.metadata_location).where(*_of(table))
        with Session(self._engine) as session:
            at = session.scalar(found.where(IcebergTables.table_name == name))
        if at is None:
            raise NoSuchTableError(f"Table does not exist: {DRAFTS}.{table}.{name}")
        return str(at)

    def remove(self, table: str, name: str | None = None) -> None:
        """Remove an entry, or all of a table."""
        gone = delete(IcebergTables).where(*_of(table))
        if name is not None:
            gone = gone.where(IcebergTables.table_name == name)
        with Session(self._engine) as session:
            session.execute(gone)
            session.commit()


def _of(table: str) -> tuple[Any, ...]:
    return IcebergTables.catalog_name == DRAFTS, IcebergTables.table_namespace == table
