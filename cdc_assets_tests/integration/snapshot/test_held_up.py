"""What holds a pin or a copy up: the role's time-outs, and transactions of others."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.errors import SlotBusy
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.pins import pins
from cdc_assets.postgres import slots as replication
from cdc_assets.postgres.slots import NewSlot, create_slot
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.integration.snapshot.sources import PAIR, T, U, role
from cdc_assets_tests.support.lake import lake

pytestmark = pytest.mark.spark


def test_the_time_outs_of_the_role_end_neither_pin_nor_copy_nor_stream(
    any_postgres_dsn: NewDatabase,
    spark_server: SparkServer,
    tmp_home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def slow(dsn: str, slot: str, *, temporary: bool) -> NewSlot:
        made = create_slot(dsn, slot, temporary=temporary)
        time.sleep(1.5)  # as planning many tables would
        return made

    monkeypatch.setattr(pins, "create_slot", slow)
    dsn = any_postgres_dsn()
    settings = [
        "statement_timeout = '1ms'",
        "lock_timeout = '1ms'",
        "idle_in_transaction_session_timeout = '1s'",
        "idle_session_timeout = '1s'",
    ]
    with psycopg.connect(dsn, autocommit=True) as held:
        if held.info.server_version >= 170000:
            settings.append("transaction_timeout = '1s'")
        with (
            role(dsn, *settings) as (name, role_dsn),
            lake(
                dsn,
                spark_server.ensure(),
                f"{PAIR} alter table t owner to {name}; alter table u owner to {name};",
                {"name": "t", "chunk_pages": 1},
                "u",
                postgres={"dsn": role_dsn},
            ) as source,
        ):
            # Slot creation waits for this writer, longer than each of the time-outs.
            with ended_later(held, "update u set v = 'meanwhile' where id = 1", 2.0):
                source.pin()
            time.sleep(3.0)
            source.execute("update t set v = 'new' where id % 3 = 0")
            # A task waits for this lock, and its claims are idle meanwhile.
            with ended_later(held, "lock table t in access exclusive mode", 2.5):
                source.copy()
            assert len(source.rows(T)) == 1000
            assert {row.epoch for row in source.pipeline.store.tables()} == {1}
            source.catch_up()
            assert source.equal(T)
            assert source.equal(U)


@contextmanager
def ended_later(held: psycopg.Connection[Any], statement: str, seconds: float) -> Iterator[None]:
    """A transaction of somebody else's that ``statement`` is in, committed after some seconds."""

    def end() -> None:
        time.sleep(seconds)
        held.execute("commit")

    held.execute("begin")
    held.execute(statement.encode())
    ending = threading.Thread(target=end)
    ending.start()
    try:
        yield
    finally:
        ending.join()


def test_a_pin_that_is_held_up_names_the_transaction_and_comes_after_it(
    postgres_dsn: NewDatabase,
    spark_server: SparkServer,
    tmp_home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replication, "SLOT_PATIENCE_SECONDS", 2)
    dsn = postgres_dsn()
    with (
        lake(dsn, spark_server.ensure(), PAIR, "t") as source,
        psycopg.connect(dsn, application_name="nightly report") as writer,
    ):
        writer.execute("update t set v = 'late' where id = 1")
        with pytest.raises(SlotBusy) as busy:
            source.pin()
        assert f"process {writer.info.backend_pid} (nightly report, role postgres)" in str(
            busy.value
        )
        writer.commit()
        source.pin()
        source.copy()
        assert source.equal(T)


def test_a_pin_that_a_prepared_transaction_holds_up_names_it(
    public_directory: Path,
    spark_server: SparkServer,
    tmp_home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replication, "SLOT_PATIENCE_SECONDS", 2)
    settings = {"fsync": "off", "max_prepared_transactions": "2"}
    with (
        EmbeddedPostgres(public_directory / "prepared", settings=settings) as server,
        lake(server.start(), spark_server.ensure(), PAIR, "t") as source,
    ):
        source.execute("begin")
        source.execute("update t set v = 'late' where id = 1")
        source.execute("prepare transaction 'forgotten'")
        with pytest.raises(SlotBusy, match="prepared transaction 'forgotten' \\(postgres\\)"):
            source.pin()
        source.execute("rollback prepared 'forgotten'")
        source.pin()
        source.copy()
        assert source.equal(T)
