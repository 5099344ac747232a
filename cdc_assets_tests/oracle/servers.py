"""What all seeds of a run share: one Postgres, one Spark session, the lake's catalog, a folder."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict
from pyspark.sql import SparkSession

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.lake.spark.session import open_session
from cdc_assets_tests.oracle.plan import Plan

LAKE, LOG = "oracle_lake", "oracle_log"


@dataclass(slots=True)
class Servers:
    """``dsn`` is the Postgres server's, of a superuser."""

    dsn: str
    spark_url: str
    folder: Path
    session: SparkSession | None = None

    def database(self, name: str) -> str:
        parts = conninfo_to_dict(self.dsn)
        return f"postgresql://{parts['user']}:{parts['password']}@{parts['host']}:{parts['port']}/{name}"

    @property
    def catalog_uri(self) -> str:
        """As SQLAlchemy has it."""
        return self.database(LAKE).replace("postgresql:", "postgresql+psycopg:")

    @property
    def warehouse(self) -> str:
        return (self.folder / "warehouse").as_uri()

    def config(self, plan: Plan, source: str) -> dict[str, Any]:
        """The source's configuration, as a file has it."""
        lake = {"catalog": {"uri": self.catalog_uri, "warehouse": self.warehouse}}
        return {
            "name": source,
            "postgres": {"dsn": self.database(source)},
            "tables": [
                {"name": table.sql.replace("${", "$${"), **table.settings} for table in plan.tables
            ],
            "spark": {"remote": self.spark_url},
            "staging": {
                "uri": (self.folder / source / "staging").as_uri(),
                "flush_interval": "50ms",
            },
            "state": {"postgres_url": self.database(LOG) if plan.apart else None},
            "maintenance": {
                "keep_snapshots": {"count": 1, "age": "0s"},
                "min_input_files": 2,
                "staged_grace": "0s",
            },
            **plan.settings,
            "lake": lake | plan.settings.get("lake", {}),
        }

    def spark(self, config: SourceConfig) -> SparkSession:
        """The session of all seeds: they have one catalog, so its settings are the same."""
        if self.session is None:
            self.session = open_session(config)
        return self.session

    def parsed(self, plan: Plan, source: str) -> SourceConfig:
        return parse_config(self.config(plan, source), "oracle")

    def create(self, name: str) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as admin:
            admin.execute(sql.SQL("create database {}").format(sql.Identifier(name)))

    def drop(self, name: str) -> None:
        """With whoever is connected, and its slots."""
        with psycopg.connect(self.dsn, autocommit=True) as admin:
            admin.execute(
                "select pg_terminate_backend(pid, 5000) from pg_stat_activity where datname = %s",
                [name],
            )
            admin.execute(
                "select pg_drop_replication_slot(slot_name) from pg_replication_slots"
                " where database = %s and not active",
                [name],
            )
            admin.execute(
                sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name))
            )


@contextmanager
def serving(dsn: str, spark_url: str, folder: Path | None = None) -> Iterator[Servers]:
    """The shared databases on a server that runs, while it lasts."""
    place = Path(tempfile.mkdtemp(prefix="oracle-", dir=folder))
    found = Servers(dsn, spark_url, place)
    try:
        for name in (LAKE, LOG):
            found.drop(name)
            found.create(name)
        yield found
    finally:
        if found.session is not None:
            found.session.stop()
        for name in (LAKE, LOG):
            found.drop(name)
        shutil.rmtree(place, ignore_errors=True)
