"""Staged files on an S3-protocol server and on disk: where they are, and that they are whole."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from moto.server import ThreadedMotoServer
from pyarrow import fs

from cdc_assets.flusher.decoder import Decoder, Pending
from cdc_assets.flusher.staged_rows import DecodeSpec
from cdc_assets.flusher.staging import Staging, folder_name
from cdc_assets.log.files import Storage
from cdc_assets.postgres.names import TableId
from cdc_assets_tests import pgoutput_reference as ref

TABLE = TableId("public", 'My/"odd" tåble')


def pending(rows: int) -> list[Pending]:
    decoder = Decoder({1: DecodeSpec(TABLE, ("id",))}.get)
    frames = [
        ref.xlog(1, ref.begin(9, 0, 7)),
        ref.xlog(1, ref.relation(1, ["id"], ["id"])),
        *[ref.xlog(2, ref.insert(1, [str(number)])) for number in range(rows)],
        ref.xlog(9, ref.commit(9, 10, 0)),
    ]
    decoder.feed(b"".join(frames), np.array([len(f) for f in frames], np.int32))
    return decoder.take_committed()


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = ThreadedMotoServer("127.0.0.1", port, verbose=False)
    server.start()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    storage = Storage(f"http://127.0.0.1:{port}", "us-east-1", path_style=True)
    filesystem = fs.S3FileSystem(
        endpoint_override=storage.endpoint, region="us-east-1", allow_bucket_creation=True
    )
    filesystem.create_dir("bucket")
    yield storage
    server.stop()


def test_an_object_store(s3: Storage) -> None:
    staging = Staging("s3://bucket/prefix", "shop", s3)
    (file,) = staging.write(pending(1000))
    staging.close()
    assert file.path.startswith(f"s3://bucket/prefix/shop/{folder_name(TABLE)}/")
    filesystem, path = s3.locate(file.path)
    table = pq.read_table(path, filesystem=filesystem)
    assert (table.num_rows, file.row_count) == (1000, 1000)
    assert filesystem.get_file_info(path).size == file.byte_size


def test_a_folder_whose_name_needs_escapes(tmp_path: Path) -> None:
    folder = tmp_path / "with space, % and #"
    storage = Storage()
    staging = Staging(folder.as_uri(), "shop", storage)
    first, second = staging.write(pending(1)) + staging.write(pending(2))
    staging.close()
    assert first.path != second.path
    for file in (first, second):
        filesystem, path = storage.locate(file.path)
        assert pq.read_table(path, filesystem=filesystem).num_rows == file.row_count
        assert Path(path).is_relative_to(folder)
    assert not list(folder.rglob("*.tmp"))


def test_folders_of_two_tables_never_meet() -> None:
    tables = [TableId("a", "b.c"), TableId("a.b", "c"), TableId("a", "b_c"), TableId("a", "b c")]
    tables += [
        TableId("a", "B"),
        TableId("a", "b"),
        TableId("a", "x" * 60 + "é"),
        TableId("a", "é"),
    ]
    assert len({folder_name(table) for table in tables}) == len(tables)
    assert folder_name(TableId("public", "orders")) == "public.orders"
