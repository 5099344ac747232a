"""What tests of adopted tables share: a lake table that somebody else has made, and its rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestWriterV2,
    write_manifest_list,
)
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.table.update import AddSnapshotUpdate, SetSnapshotRefUpdate
from pyiceberg.typedef import Record

from cdc_assets.config.source import parse_config
from cdc_assets.lake.catalog.catalog import open_catalog
from cdc_assets.lake.tables import LakeTable
from cdc_assets.log.states import TableState
from cdc_assets.observe.status import collect
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.slots import create_slot
from cdc_assets_tests.support.lake import Lake
from cdc_assets_tests.support.waiting import wait_for

T = TableId("public", "t")
SETUP = """
create table t (id int generated always as identity primary key, v text, n numeric(10, 2));
insert into t (v, n) select 'a' || i, i from generate_series(1, 40) i;
"""
# In another order than the source has them.
COLUMNS = "n decimal(10,2), id int, v string"


def begin(source: Lake) -> None:
    """Have the table's log begin."""

    def begun() -> bool:
        source.pin()
        return source.row(T).state == TableState.STREAMING

    wait_for(begun)


def asks(source: Lake, adopt: object) -> None:
    """Start again, as it were, with another ``adopt``."""
    tables = [{"name": "t", "adopt": adopt}]
    given = {"postgres": {"dsn": source.pipeline.source_dsn}, "tables": tables}
    spark = {"remote": source.config.spark.remote}
    source.config = parse_config({"name": "src", "spark": spark, **given}, "test")
    source.pipeline.config = source.config


def location(source: Lake) -> str:
    return f"{source.config.warehouse}/src/t"


def made(source: Lake, columns: str = COLUMNS, more: str = "", **properties: object) -> None:
    """An empty table, by Spark SQL."""
    open_catalog(source.config)  # makes its own tables
    source.session.sql("create namespace if not exists lake.src")
    told = "".join(f", '{key}' = '{value}'" for key, value in properties.items())
    source.session.sql(
        f"create table lake.src.t ({columns}) using iceberg {more} location '{location(source)}'"
        f" tblproperties ('format-version' = '2'{told})"
    )


def filled(source: Lake, rows: Sequence[tuple[Any, ...]]) -> None:
    """Insert rows of the source, by Spark SQL."""
    values = ", ".join(f"({number}, {v!r}, {n})" for number, v, n in rows)
    source.session.sql(f"insert into lake.src.t (id, v, n) values {values}")


def by_pyiceberg(source: Lake, rows: Sequence[tuple[Any, ...]]) -> None:
    """The same table with its rows, by pyiceberg."""
    schema = pa.schema([("v", pa.string()), ("n", pa.decimal128(10, 2)), ("id", pa.int32())])
    data = [{"id": i, "v": v, "n": n} for i, v, n in rows]
    catalog = open_catalog(source.config)
    catalog.create_namespace_if_not_exists("src")
    table = catalog.create_table(("src", "t"), schema, location(source))
    table.append(pa.Table.from_pylist(data, schema))


def consistent(source: Lake) -> tuple[Lsn, list[tuple[Any, ...]]]:
    """The source's rows at an LSN, as a careful tool reads them."""
    slot = create_slot(source.pipeline.replication_dsn, "other_tool", temporary=True)
    assert slot.snapshot_name is not None
    with source.pipeline.connect_source("other tool") as connection:
        connection.autocommit = False
        connection.execute("set transaction isolation level repeatable read")
        connection.execute(f"set transaction snapshot '{slot.snapshot_name}'".encode())
        rows = connection.execute("select id, v, n from public.t").fetchall()
    slot.connection.close()
    return slot.consistent_point, rows


def loaded(source: Lake) -> Table:
    return open_catalog(source.config).load_table(("src", "t"))


def info(source: Lake) -> str:
    """What ``status`` tells of the table."""
    [table] = collect(source.pipeline).tables
    return " ".join(table.info)


def equal(source: Lake) -> bool:
    names = "id, v, n"
    name = LakeTable(source.config, source.config.table(T), source.row(T)).sql_name
    there = source.session.sql(f"select {names} from {name}").collect()
    here = source.execute(f"select {names} from t")
    return sorted(tuple(row) for row in there) == sorted(here)


class _DeleteManifests(ManifestWriterV2):
    """pyiceberg itself writes manifests of data files alone."""

    def content(self) -> ManifestContent:
        return ManifestContent.DELETES

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}


def equality_deletes(source: Lake) -> None:
    """Commit a file of equality deletes by id, as Flink or Airbyte writes them.

    Spark can't read it: pyiceberg writes the ids of the columns as longs.
    """
    table = loaded(source)
    before = table.current_snapshot()
    assert before is not None
    number, sequence = before.snapshot_id + 1, (before.sequence_number or 0) + 1
    field = table.schema().find_field("id").field_id
    file = f"{table.location()}/data/equality-deletes.parquet"
    written = Path(file.removeprefix("file:"))
    column = pa.field("id", pa.int32(), metadata={"PARQUET:field_id": str(field)})
    pq.write_table(pa.table({"id": [1]}, pa.schema([column])), written)
    deletes = DataFile.from_args(
        content=DataFileContent.EQUALITY_DELETES,
        file_path=file,
        file_format=FileFormat.PARQUET,
        partition=Record(),
        record_count=1,
        file_size_in_bytes=written.stat().st_size,
        equality_ids=[field],
    )
    deletes.spec_id = table.spec().spec_id
    entry = ManifestEntry.from_args(
        status=ManifestEntryStatus.ADDED, snapshot_id=number, data_file=deletes
    )
    place = f"{table.location()}/metadata/equality-deletes"
    manifest = table.io.new_output(f"{place}.avro")
    with _DeleteManifests(table.spec(), table.schema(), manifest, number, "deflate") as writer:
        writer.add_entry(entry)
    listed = table.io.new_output(f"{place}-list.avro")
    with write_manifest_list(
        2, listed, number, before.snapshot_id, sequence, "deflate"
    ) as manifests:
        manifests.add_manifests([*before.manifests(table.io), writer.to_manifest_file()])
    snapshot = Snapshot.model_validate(
        {
            "snapshot-id": number,
            "parent-snapshot-id": before.snapshot_id,
            "sequence-number": sequence,
            "timestamp-ms": before.timestamp_ms + 1,
            "manifest-list": f"{place}-list.avro",
            "summary": {"operation": "delete"},
            "schema-id": table.schema().schema_id,
        }
    )
    main = SetSnapshotRefUpdate.model_validate(
        {"ref-name": "main", "type": "branch", "snapshot-id": number}
    )
    table.catalog.commit_table(table, (), (AddSnapshotUpdate(snapshot=snapshot), main))
