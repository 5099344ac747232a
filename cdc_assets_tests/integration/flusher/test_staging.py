"""Staged files on an S3-protocol server and on disk: where they are, and that they are whole."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from cdc_assets.config.sections import S3Config
from cdc_assets.errors import StagedFileChanged, StagingProblem
from cdc_assets.flusher.decode.decoder import Decoder
from cdc_assets.flusher.decode.specs import DecodeSpec
from cdc_assets.flusher.decode.waiting import Pending
from cdc_assets.flusher.stage.staging import SHARED_FILE_BYTES, SMALL_BYTES, Staging
from cdc_assets.log.batch import Window, facts, outlines
from cdc_assets.log.relation import alike
from cdc_assets.log.staged.storage import Storage, check_place, folder_name
from cdc_assets.log.store import LogEntry
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support import pgoutput_reference as ref
from cdc_assets_tests.support.s3 import Fault, ObjectStore, cut, hang, lost_answer, status

TABLE = TableId("public", 'My/"odd" tåble')


def pending(rows: int) -> list[Pending]:
    decoder = Decoder({1: DecodeSpec(TABLE, ("id",))}.get)
    frames = [
        ref.xlog(1, ref.begin(9, 0, 7)),
        ref.xlog(1, ref.relation(1, ["id"], ["id"])),
        *[ref.xlog(2, ref.insert(1, [str(number)])) for number in range(rows)],
        ref.xlog(10, ref.commit(9, 10, 0)),
    ]
    decoder.feed(b"".join(frames), np.array([len(f) for f in frames], np.int32))
    return decoder.take_committed()


def storage_of(store: ObjectStore) -> Storage:
    return Storage.of(S3Config.model_validate(store.settings))


def test_small_tables_share_files_and_each_finds_its_rows(s3: ObjectStore) -> None:
    decoder = Decoder(lambda oid: DecodeSpec(TableId("public", f"t{oid}"), ("id",)))
    big = "x" * SMALL_BYTES
    # Of table 7 there is much, of 8 and 9 the columns change in between, 9 is truncated, too.
    frames = [ref.xlog(1, ref.begin(9, 0, 7))]
    for oid in (9, 2, 7, 8):
        frames.append(ref.xlog(1, ref.relation(oid, ["id"], ["id"])))
        frames += [ref.xlog(2, ref.insert(oid, [f"{oid}.{i}"])) for i in range(oid)]
    frames.append(ref.xlog(3, ref.insert(7, [big])))
    frames.append(ref.xlog(3, ref.truncate(9)))
    for oid in (8, 9):
        frames.append(ref.xlog(4, ref.relation(oid, ["id", "v"], ["id"])))
        frames.append(ref.xlog(4, ref.insert(oid, ["new", "1"])))
    frames.append(ref.xlog(10, ref.commit(9, 10, 0)))
    decoder.feed(b"".join(frames), np.array([len(f) for f in frames], np.int32))
    storage = storage_of(s3)
    staging = Staging("s3://bucket/prefix", "shop", storage)
    written = staging.write(decoder.take_committed())
    staging.close()
    assert s3.requests == {"PUT": 2}  # one for table 7, one for the others

    found: dict[str, list[str]] = {}
    for file in written:
        table = file.read(storage)
        told = file.opened(storage).relation()
        assert f"t{told['oid']}" == file.table.name
        for op, data in zip(table["_op"].to_pylist(), table["_data"].to_pylist(), strict=True):
            row = json.loads(data) if op != "T" else {}
            assert list(row) == ([name for name, *_ in told["columns"]] if row else [])
            found.setdefault(file.table.name, []).append(row.get("id", op))
        assert (file.first_row is None) == (file.table.name == "t7")
        assert Counter(table["_op"].to_pylist()) == file.operations
    assert {"/shared/" in file.path for file in written if file.first_row is not None} == {True}
    assert found == {
        "t2": ["2.0", "2.1"],
        "t7": [*(f"7.{i}" for i in range(7)), big],
        "t8": [*(f"8.{i}" for i in range(8)), "new"],
        "t9": [*(f"9.{i}" for i in range(9)), "T", "new"],
    }
    filesystem, path = storage.locate(next(file.path for file in written if file.first_row == 0))
    shares = sum(file.byte_size for file in written if file.first_row is not None)
    size = filesystem.get_file_info(path).size
    assert size <= shares <= size + len(written)


def test_what_decides_how_a_batch_is_folded_takes_one_read_of_each_shared_file(
    s3: ObjectStore,
) -> None:
    """Keys that changed beside unchanged columns and a truncate are what most is asked of."""
    storage, tables = storage_of(s3), range(1, 5)
    staging, entries = Staging("s3://bucket/prefix", "shop", storage), list[LogEntry]()
    for number in range(3):
        decoder = Decoder(lambda oid: DecodeSpec(TableId("public", f"t{oid}"), ("id",)))
        frames = [ref.xlog(1, ref.begin(9, 0, 7))]
        for oid in tables:
            frames.append(ref.xlog(1, ref.relation(oid, ["id", "v"], ["id"])))
            frames.append(ref.xlog(2, ref.update(oid, ["new", ref.UNCHANGED], [f"{number}", None])))
            frames.append(ref.xlog(3, ref.truncate(oid)))
        frames.append(ref.xlog(10, ref.commit(9, 10, 0)))
        decoder.feed(b"".join(frames), np.array([len(f) for f in frames], np.int32))
        (mine,) = (f for f in staging.write(decoder.take_committed()) if f.table.name == "t3")
        assert mine.first_row is not None
        start = entries[-1].end_offset if entries else 0
        entries.append(LogEntry(start, mine, Lsn(10), datetime.now(UTC)))
    staging.close()
    s3.requests.clear()
    outlined, told = alike(outlines(entries, storage))
    # What somebody puts there now decides nothing, and is refused where it is read.
    filesystem, path = storage.locate(entries[0].rows.path)
    with filesystem.open_output_stream(path) as out:
        out.write(b"another file")
    found = facts(outlined, Window(0, Lsn(0)), ["id"])
    assert facts(outlined, Window(0, Lsn(0)), ["id"]) == found
    assert s3.requests == {"HEAD": 3, "GET": 3, "PUT": 1}
    assert [c.name for c in told.columns] == ["id", "v"]
    first, *_, last = entries
    assert (found.rows, found.truncate, found.first_truncate) == (
        last.end_offset,
        last.end_offset - 1,
        first.end_offset - 1,
    )
    assert found.unchanged == {"v"}
    keys = {key for pairs in found.relinked for _, key in pairs}
    assert keys == {"new", "0", "1", "2"}
    with pytest.raises(StagedFileChanged):
        entries[0].rows.read(storage)


def test_shared_files_are_cut(tmp_path: Path) -> None:
    count = 3 * SHARED_FILE_BYTES // (SMALL_BYTES // 2)
    decoder = Decoder(lambda oid: DecodeSpec(TableId("public", f"t{oid}"), ("id",)))
    frames = [ref.xlog(1, ref.begin(9, 0, 7))]
    value = "x" * (SMALL_BYTES // 2)
    for oid in range(1, count + 1):
        frames.append(ref.xlog(1, ref.relation(oid, ["id"], ["id"])))
        frames.append(ref.xlog(2, ref.insert(oid, [value])))
    frames.append(ref.xlog(10, ref.commit(9, 10, 0)))
    decoder.feed(b"".join(frames), np.array([len(f) for f in frames], np.int32))
    staging = Staging(tmp_path.as_uri(), "shop", Storage())
    written = staging.write(decoder.take_committed())
    staging.close()
    assert len(written) == count
    assert 3 <= len({file.path for file in written}) <= 4
    assert [file.table.name for file in written] == [f"t{oid}" for oid in range(1, count + 1)]


def test_an_object_store(s3: ObjectStore) -> None:
    storage = storage_of(s3)
    staging = Staging("s3://bucket/prefix", "shop", storage)
    (file,) = staging.write(pending(1000))
    staging.close()
    assert s3.requests == {"PUT": 1}  # a small file is one request
    assert file.path.startswith(f"s3://bucket/prefix/shop/{folder_name(TABLE)}/")
    filesystem, path = storage.locate(file.path)
    table = pq.read_table(path, filesystem=filesystem)
    assert (table.num_rows, file.row_count) == (1000, 1000)
    assert filesystem.get_file_info(path).size == file.byte_size


@pytest.mark.parametrize(
    "fault",
    [
        status(500, "InternalError"),
        status(503, "SlowDown"),
        status(403, "RequestTimeTooSkewed"),
        cut,
        lost_answer,
        hang(1),
    ],
    ids=["500", "503", "403", "cut", "lost answer", "hang"],
)
def test_a_failing_object_store_is_waited_for(s3: ObjectStore, fault: Fault) -> None:
    troubles: list[str] = []

    def trouble(reason: str) -> None:
        troubles.append(reason)
        if len(troubles) == 3:
            s3.fault = None

    storage = storage_of(s3)
    staging = Staging("s3://bucket/prefix", "shop", storage, trouble)
    s3.fault = fault
    (file,) = staging.write(pending(100))
    staging.close()
    assert len(troubles) >= 3
    assert all("AWS Error" in text for text in troubles)
    filesystem, path = storage.locate(file.path)
    assert pq.read_table(path, filesystem=filesystem).num_rows == 100


def test_files_are_uploaded_in_parallel(s3: ObjectStore) -> None:
    arrived, met = threading.Condition(), 0

    def meet(_: object) -> bool:
        """Wait for three others; of what an earlier test left hanging none comes."""
        nonlocal met
        with arrived:
            met += 1
            arrived.notify_all()
            arrived.wait_for(lambda: met >= 4, 40)
        return False

    staging = Staging("s3://bucket/prefix", "shop", storage_of(s3))
    s3.fault = meet
    began = time.monotonic()
    assert len(staging.write(pending(40_000) * 4)) == 4  # too much to share a file
    staging.close()
    assert time.monotonic() - began < 40, "one waited alone"


def test_closing_ends_a_wait(s3: ObjectStore) -> None:
    s3.fault = status(503, "SlowDown")
    told = threading.Event()
    staging = Staging("s3://bucket/prefix", "shop", storage_of(s3), lambda _: told.set())
    errors = list[OSError]()

    def write() -> None:
        try:
            staging.write(pending(1))
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    assert told.wait(30)
    staging.close()
    thread.join(30)
    assert not thread.is_alive()
    assert errors


@pytest.mark.parametrize("wrong", ["no bucket", "denied"])
def test_an_object_store_that_waiting_does_not_mend(s3: ObjectStore, wrong: str) -> None:
    uri = "s3://nobucket/x" if wrong == "no bucket" else "s3://bucket/x"
    s3.fault = status(403, "AccessDenied") if wrong == "denied" else None
    with pytest.raises(StagingProblem, match=r"can't be written.*staging\.uri.*AWS_"):
        check_place(uri, "shop", storage_of(s3))
    s3.fault = None
    check_place("s3://bucket/x", "shop", storage_of(s3))


def test_an_object_store_that_is_down_is_no_mistake(s3: ObjectStore) -> None:
    s3.fault = status(503, "SlowDown")
    check_place("s3://bucket/x", "shop", storage_of(s3))
    check_place("s3://bucket/x", "shop", Storage("http://127.0.0.1:1", "us-east-1", True))


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for below in ("file", "file/folder"):
        with pytest.raises(StagingProblem, match=r"can't be written.*staging\.uri"):
            check_place((tmp_path / below).as_uri(), "shop", Storage())


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
