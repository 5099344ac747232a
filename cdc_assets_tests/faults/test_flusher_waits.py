"""What a flusher lives through: full disks, object stores that fail, databases that go away.

It goes on living and trying, says what it waits for, answers the server meanwhile, acknowledges
nothing that isn't registered, and afterwards the log has each change once.
"""

from __future__ import annotations

import random
import resource
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psycopg
import pytest

from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.errors import NotReady
from cdc_assets.flusher.flusher import run
from cdc_assets.flusher.progress import Progress
from cdc_assets.flusher.session import IN_FLIGHT_BYTES
from cdc_assets.flusher.stream import Stream
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.slots import current_lsn
from cdc_assets_tests.faults.ledger import TABLE, check, writing
from cdc_assets_tests.support.flusher import Bench, bench, flushing, reconnect, start_flusher
from cdc_assets_tests.support.s3 import Fault, ObjectStore, cut, hang, lost_answer, status
from cdc_assets_tests.support.waiting import wait_for

# It asks after half of it; a busy machine may well stop us for a second.
IMPATIENT = {"fsync": "off", "wal_sender_timeout": "3s"}
# Nobody who says nothing for so long is still connected.
SILENCE_SECONDS = 4.0
OPTIONS = {"flush_interval": "50ms", "flush_bytes": "100kB"}


@pytest.fixture(scope="module")
def impatient(public_directory: Path) -> Iterator[EmbeddedPostgres]:
    """A server that hangs up on whoever is silent for three seconds."""
    server = EmbeddedPostgres(public_directory / "impatient", settings=IMPATIENT)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def source(impatient: EmbeddedPostgres, tmp_path: Path) -> Iterator[Bench]:
    dsn = impatient.dsn()
    assert dsn is not None
    with bench(dsn, "f_waits", tmp_path) as made:
        made.execute(TABLE)
        yield made


def streams_since(source: Bench) -> list[tuple[object, ...]]:
    """The walsender of the slot, and when it began."""
    return source.execute(
        "select pid, backend_start from pg_stat_replication where application_name = %s",
        f"cdc_assets {source.name} flusher",
    )


def acked_only_what_is_registered(source: Bench) -> bool:
    confirmed = source.confirmed()  # asked for first: both only rise
    return confirmed <= source.flushed()


@contextmanager
def one_stream(source: Bench, progress: Progress) -> Iterator[None]:
    """In the block the stream isn't lost, and nothing unregistered is acknowledged."""
    # The walsender of the flush before may be listed for a moment yet.
    wait_for(lambda: progress.state == "streaming" and len(streams_since(source)) == 1)
    before = streams_since(source)
    yield
    assert acked_only_what_is_registered(source)
    assert streams_since(source) == before
    assert progress.reconnects == 0


def watch(source: Bench, progress: Progress, seconds: float) -> None:
    """For longer than wal_sender_timeout: nothing moves, it is said why, nothing is acked."""
    flushed = source.flushed()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        assert source.flushed() == flushed
        assert acked_only_what_is_registered(source)
        assert progress.state == "retrying staging"
        time.sleep(0.1)


def caught_up(source: Bench, progress: Progress) -> None:
    end = current_lsn(source.connection)
    wait_for(lambda: source.flushed() >= end)
    wait_for(lambda: progress.state == "streaming")


def mounted(folder: Path, *options: str) -> None:
    done = subprocess.run(["mount", *options, str(folder)], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting isn't permitted here: {done.stderr.decode()}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte, below the place where files are staged."""
    folder = tmp_path / "staging"
    folder.mkdir()
    mounted(folder, "-t", "tmpfs", "-o", "size=1m", "tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("how", ["full", pytest.param("read-only", marks=pytest.mark.soak)])
def test_a_disk_that_cannot_be_written_is_waited_for(
    source: Bench, small_disk: Path, how: str
) -> None:
    config = source.config("public.t", **OPTIONS)
    source.flush(config)
    ballast = small_disk / "ballast"
    with flushing(config) as progress, one_stream(source, progress):
        if how == "full":
            with pytest.raises(OSError, match="No space left"):
                ballast.write_bytes(b"x" * 2**20)
        else:
            mounted(small_disk, "-o", "remount,ro")
        source.execute("insert into t select 0, g, 'x' from generate_series(0, 9999) g")
        wait_for(lambda: progress.staging_retries > 2)
        watch(source, progress, SILENCE_SECONDS)
        expected = "No space left" if how == "full" else "Read-only file system"
        assert progress.last_error is not None
        assert expected in progress.last_error
        if how == "full":
            ballast.unlink()
        else:
            mounted(small_disk, "-o", "remount,rw")
        caught_up(source, progress)
    assert check(source) == 10_000
    assert not list(small_disk.rglob("*.tmp"))


def test_a_disk_quota_is_waited_for_in_bounded_memory(
    source: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing can be mounted: the decoder may not make a file larger than a page.

    What the server's TCP sent in vain meanwhile may come as long again after it: until then the
    server isn't seen to ask, and gets feedback unasked.
    """
    given = list[float]()
    acknowledge = Stream.acknowledge

    def counted(stream: Stream, flushed: Lsn, *, reply: bool = False) -> None:
        given.append(time.monotonic())
        acknowledge(stream, flushed, reply=reply)

    monkeypatch.setattr(Stream, "acknowledge", counted)
    config = source.config("public.t", **OPTIONS)
    source.flush(config)
    with flushing(config) as progress, one_stream(source, progress):
        wait_for(lambda: progress.decoder_pid is not None)
        assert progress.decoder_pid is not None
        _, hard = resource.prlimit(progress.decoder_pid, resource.RLIMIT_FSIZE, (1024, -1))
        for part in range(10):  # 100 MB: more than may be under way
            source.execute(
                "insert into t select %s, g, repeat('x', 1000) from generate_series(0, 9999) g",
                part,
            )
        wait_for(lambda: progress.in_flight_bytes >= IN_FLIGHT_BYTES)
        wait_for(lambda: progress.staging_retries > 2)
        assert progress.in_flight_bytes < IN_FLIGHT_BYTES + 8 * 2**20
        watch(source, progress, SILENCE_SECONDS)
        assert progress.last_error is not None
        assert "File too large" in progress.last_error
        resource.prlimit(progress.decoder_pid, resource.RLIMIT_FSIZE, (hard, hard))
        caught_up(source, progress)
        before = len(given)
        time.sleep(SILENCE_SECONDS / 2)
        assert len(given) - before > SILENCE_SECONDS
    assert check(source) == 100_000


def test_a_place_that_nobody_can_write_is_refused_at_once(source: Bench, tmp_path: Path) -> None:
    (tmp_path / "staging").write_text("a file where a folder has to be")
    with pytest.raises(NotReady, match=r"staging\.uri"):
        source.flush(source.config("public.t"))
    assert source.execute("select from pg_replication_slots where database = %s", source.name) == []


@pytest.mark.soak  # test_staging has each answer by itself
def test_an_object_store_that_is_busy_is_waited_for(source: Bench, s3: ObjectStore) -> None:
    source.s3 = s3.settings
    config = source.config("public.t", **OPTIONS)
    source.flush(config)
    with flushing(config) as progress, one_stream(source, progress):
        s3.fault = status(503, "SlowDown")
        source.execute("insert into t select 0, g, 'x' from generate_series(0, 9999) g")
        wait_for(lambda: progress.staging_retries > 2)
        watch(source, progress, SILENCE_SECONDS)
        assert "AWS Error" in str(progress.last_error)
        s3.fault = None
        caught_up(source, progress)
    assert check(source) == 10_000


def test_an_upload_that_hangs_for_longer_than_wal_sender_timeout(
    source: Bench, s3: ObjectStore
) -> None:
    source.s3 = s3.settings
    config = source.config("public.t", **OPTIONS)
    source.flush(config)
    with flushing(config) as progress, one_stream(source, progress):
        s3.fault = hang(60)
        source.execute("insert into t select 0, g, 'x' from generate_series(0, 9999) g")
        wait_for(lambda: s3.hanging)
        flushed = source.flushed()
        time.sleep(SILENCE_SECONDS)
        assert source.flushed() == flushed
        assert acked_only_what_is_registered(source)
        s3.fault = None
        s3.release()
        caught_up(source, progress)
    assert check(source) == 10_000


def test_an_object_store_that_is_gone_for_a_while(source: Bench, s3: ObjectStore) -> None:
    """Its port refuses connections, from the start on."""
    source.s3 = s3.settings
    config = source.config("public.t", **OPTIONS)
    source.flush(config)
    source.execute("insert into t select 0, g, 'x' from generate_series(0, 99) g")
    s3.down()
    with flushing(config) as progress, one_stream(source, progress):
        wait_for(lambda: progress.staging_retries > 2)
        assert "Could not connect" in str(progress.last_error)
        s3.up()
        caught_up(source, progress)
    assert check(source) == 100


def _failed_since(s3: ObjectStore, failed: int) -> bool:
    return s3.failed > failed + 1


def test_killed_while_the_object_store_fails(source: Bench, s3: ObjectStore) -> None:
    """Half of its requests fail in all ways; whatever is registered is there, whole."""
    chance = random.Random(7)
    ways: list[Fault] = [
        status(500, "InternalError"),
        status(503, "SlowDown"),
        cut,
        lost_answer,
        hang(0.2),
    ]
    source.s3 = s3.settings
    config = source.config("public.t", **OPTIONS)
    source.flush(config)
    s3.fault = lambda handler: chance.random() < 0.5 and chance.choice(ways)(handler)
    with writing(source, pause=0.1):
        for _ in range(4):
            child = start_flusher(source.config_file("public.t", **OPTIONS))
            failed = s3.failed
            wait_for(partial(_failed_since, s3, failed))
            time.sleep(chance.uniform(0, 1))
            child.kill()
            child.wait()
    s3.fault = None
    source.flush(config)
    assert check(source) > 100


def test_a_stop_while_staging_fails(source: Bench, s3: ObjectStore) -> None:
    source.s3 = s3.settings
    config = source.config("public.t", **OPTIONS)
    source.flush(config)
    child = start_flusher(source.config_file("public.t", **OPTIONS))
    try:
        wait_for(lambda: streams_since(source))
        s3.fault = hang(60)
        source.execute("insert into t select 0, g, 'x' from generate_series(0, 99) g")
        wait_for(lambda: s3.hanging)
        child.terminate()
        assert child.wait(30) == 0
    finally:
        child.kill()
        child.wait()
    assert acked_only_what_is_registered(source)
    s3.fault = None
    source.flush(config)
    assert check(source) == 100


def test_a_coordination_database_that_is_gone_for_a_while(source: Bench, tmp_path: Path) -> None:
    server = EmbeddedPostgres(tmp_path / "coordination", settings={"fsync": "off"})
    source.log_dsn = server.start()
    try:
        config = source.config("public.t", **OPTIONS)
        run(config, until=current_lsn(source.connection))
        with flushing(config) as progress:
            with writing(source, pause=0.1):
                wait_for(lambda: progress.files > 3)
                server.stop()
                wait_for(lambda: progress.state == "reconnecting")
                flushed = progress.flushed
                time.sleep(1)
                assert source.confirmed() <= flushed
                assert progress.last_error
                server.start()
                wait_for(lambda: progress.flushed > flushed)
            end = current_lsn(source.connection)
            wait_for(lambda: progress.flushed >= end)
            assert progress.reconnects
        assert check(source) > 100
    finally:
        server.stop()


def test_a_registration_that_hangs_costs_no_connection(source: Bench) -> None:
    config = source.config("public.t", **OPTIONS)
    source.flush(config)
    with flushing(config) as progress, one_stream(source, progress):
        with psycopg.connect(source.dsn) as blocker:
            blocker.execute("lock table _pg2iceberg.log_index in exclusive mode")
            source.execute("insert into t select 0, g, 'x' from generate_series(0, 99) g")
            flushed: Lsn = source.flushed()
            time.sleep(SILENCE_SECONDS)
            assert source.flushed() == flushed
            assert acked_only_what_is_registered(source)
            blocker.rollback()
        caught_up(source, progress)
    assert check(source) == 100


def test_a_walsender_that_is_terminated_again_and_again(source: Bench) -> None:
    config = source.config("public.t", **OPTIONS)
    source.flush(config)
    with flushing(config) as progress, writing(source, pause=0.1):
        for _ in range(3):
            reconnect(source, progress)
    source.flush(config)
    assert check(source) > 100
