"""The rows that a program is given are the same from a snapshot and from the log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest

from cdc_assets.consumers import Begin, Changes, SnapshotRows, follow
from cdc_assets.consumers.rows import type_text
from cdc_assets.postgres.types import mapping
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.integration.snapshot.sources import WIDE
from cdc_assets_tests.integration.test_types import TYPES, VALUES
from cdc_assets_tests.support.followers import Replica, ends, read
from cdc_assets_tests.support.incremental import INCREMENTAL, TOAST, between_parts, copy_here
from cdc_assets_tests.support.lake import NewLake
from cdc_assets_tests.support.lending import lending
from cdc_assets_tests.support.s3 import ObjectStore

T = "public.t"
SEARCH = [{"name": "search"}]


@pytest.mark.spark
def test_every_type_has_one_value_on_both_paths(copied_lake: NewLake) -> None:
    columns = {f"c{i}": (kind, [*v, "null"]) for i, (kind, v) in enumerate(VALUES.items())}
    listed = ", ".join(f"{name} {kind}" for name, (kind, _) in columns.items())
    count = max(len(values) for _, values in columns.values())

    def insert(first: int) -> str:
        rows = [
            f"({first + i}, " + ", ".join(v[i % len(v)] for _, v in columns.values()) + ")"
            for i in range(count)
        ]
        return ";".join(f"insert into t values {row}" for row in rows)

    setup = f"{TYPES} create table t (id int primary key, {listed}); {insert(0)};"
    with copied_lake(setup, "t", consumers=SEARCH) as source:
        replica = read(source, Replica())
        source.execute(insert(1000))
        source.flush()
        read(source, replica)
        rows = {row["id"]: row for row in replica.rows[T].values()}
        assert len(rows) == 2 * count
        for i in range(count):
            for name, (kind, values) in columns.items():
                copied, changed = rows[i][name], rows[1000 + i][name]
                assert repr(copied) == repr(changed), (kind, values, i)
        [begin] = (event for event in replica.of(Begin) if isinstance(event, Begin))
        for event in replica.seen:
            if isinstance(event, SnapshotRows | Changes):
                assert event.rows.schema == begin.schema


@pytest.mark.aws
@pytest.mark.spark
def test_a_snapshot_is_read_for_longer_than_keys_live_that_a_catalog_lends(
    copied_lake: NewLake, tmp_path: Path, s3: ObjectStore
) -> None:
    with lending(tmp_path, s3) as catalog:
        settings = {"s3": s3.settings, "lake": catalog.settings, "consumers": SEARCH}
        with copied_lake(WIDE, {"name": "t", "chunk_pages": 4}, **settings) as source:
            source.catch_up()
            replica = Replica()
            with follow(source.config, "search", wait=False) as stream:
                for event in stream:
                    replica.apply(event)
                    if isinstance(event, Begin | SnapshotRows):
                        catalog.end()
            assert len(replica.of(SnapshotRows)) > 2
            assert s3.refused
            assert replica.equal(source, T)


@pytest.mark.spark
def test_a_group_waits_until_the_lake_table_equals_the_source(
    new_lake: NewLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = {"name": "t", "chunk_pages": 64}
    with new_lake(TOAST, tables, snapshot=INCREMENTAL, consumers=SEARCH) as source:
        source.pin()
        with between_parts(
            monkeypatch, lambda n: source.execute(f"update t set v = 'later' where id % 50 = {n}")
        ):
            copy_here(source)
        source.flush()
        with follow(source.config, "search", wait=False) as stream:
            assert list(stream) == []
            [why] = stream.waits.values()
        assert "first merge is still to come" in why or "equals the source only from" in why
        source.catch_up()
        replica = read(source, Replica())
        assert ends(replica) == 1
        assert replica.equal(source, T)


@pytest.mark.spark
def test_masked_columns_stay_masked_and_modes_say_what_their_snapshot_is(
    copied_lake: NewLake,
) -> None:
    setup = """
    create table people (id int primary key, phone bigint, name text);
    create table kept (id int primary key, v text); alter table kept replica identity full;
    create table history (id int primary key, v text);
    insert into people values (1, 5551234567890, 'one'); insert into kept values (1, 'a'), (2, 'b');
    insert into history values (1, 'a');
    """
    people = {"name": "people", "columns": {"mask": {"phone": "last4"}, "rename": {"name": "who"}}}
    tables: list[dict[str, Any]] = [
        people,
        {"name": "kept", "mode": "soft_delete"},
        {"name": "history", "mode": "append"},
    ]
    with copied_lake(setup, *tables, consumers=SEARCH) as source:
        source.execute("delete from kept where id = 1; update history set v = 'b'")
        source.catch_up()
        replica = read(source, Replica())
        [kept] = replica.rows["public.kept"].values()
        assert kept == {"id": 2, "v": "b"}  # rows that are only marked as deleted aren't there
        history = [
            (row["_op"], row["v"])
            for event in replica.of(SnapshotRows)
            if isinstance(event, SnapshotRows) and event.table == "public.history"
            for row in event.rows.to_pylist()
        ]
        assert sorted(history) == [("I", "a"), ("U", "b")]
        source.execute("update people set phone = 5551234569876, name = 'two'")
        source.flush()
        read(source, replica)
        assert replica.rows["public.people"]["[1]"] == {"id": 1, "phone": "****9876", "who": "two"}


def test_the_types_that_every_postgres_has_are_called_as_it_calls_them(
    postgres_dsn: NewDatabase,
) -> None:
    with psycopg.connect(postgres_dsn()) as source:
        rows = source.execute(
            "select oid::int, m, format_type(oid, m) from pg_type,"
            " unnest(array[-1, (12 << 16 | 2) + 4, (3 << 16 | 2046) + 4]) m"
            " where typtype = 'b' and oid < 16384 and (m = -1 or typname ~ 'numeric')"
        ).fetchall()
    assert len(rows) > 100
    for oid, modifier, spelled in rows:
        found, known = mapping(type_text(oid, modifier)), mapping(spelled)
        assert found.lake == known.lake, (oid, spelled)
