"""Dagster's instance on SQLite, at a fraction of the CPU; ``dagster.yaml`` names it.

Dagster makes an engine for each transaction: it asks SQLite for its abilities, compiles each
statement anew, and with the connection closes the log of writes. Here engines are kept, and those
of the three databases that every tick uses keep their connections. Files, tables and
configuration are Dagster's own: without ``instance_class`` the same folder goes on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import lru_cache, wraps
from pathlib import Path
from threading import Lock
from typing import Any, Self

import dagster as dg
import yaml
from sqlalchemy import Connection, Engine, NullPool, create_engine, func, select

from cdc_assets.dagster.internals import (
    ASSET_EVENTS,
    CONTROLLER,
    FRESHNESS_DAEMON,
    FRESHNESS_INTERVAL_VARIABLE,
    FRESHNESS_MODULE,
    INDEX_SHARD_NAME,
    RELOAD_INTERVAL,
    RUNLESS_RUN_ID,
    SERVER,
    SERVER_ANSWER,
    SERVER_ID,
    SERVER_MODULE,
    SQLITE_BUSY_TIMEOUT_SECONDS,
    ConfigurableClassData,
    DagsterEventType,
    DagsterSqliteStorage,
    FreshnessState,
    FreshnessStateRecord,
    FreshnessStateRecordBody,
    InstanceRef,
    SqlEventLogStorageTable,
    SqliteEventLogStorage,
    SqliteRunStorage,
    SqliteScheduleStorage,
    deserialize_value,
)
from cdc_assets.process.collector import uncollected

# A process has few runs in sight; an engine without connections is some kilobytes.
_RUNS_KEPT = 16
_EVENTS = SqlEventLogStorageTable
# With hundreds of tables that costs seconds of CPU. A daemon hears of a new code server at once, by
# itself; if it can't fetch for more than five minutes, it ends.
REFRESH_SECONDS = 240
# The daemon goes through all assets to see whose freshness is another one: policies are of minutes.
FRESHNESS_SECONDS = 60


def _kept(url: str) -> Engine:
    """An engine that keeps its connections, and makes as many as threads ask for."""
    waits = {"timeout": SQLITE_BUSY_TIMEOUT_SECONDS}
    return create_engine(url, connect_args=waits, max_overflow=-1)


@lru_cache(_RUNS_KEPT)
def _of_run(url: str) -> Engine:
    """An engine of a run's own file, which may be removed: without connections."""
    waits = {"timeout": SQLITE_BUSY_TIMEOUT_SECONDS}
    return create_engine(url, connect_args=waits, poolclass=NullPool)


def _answers_once(server: Any) -> None:
    """Have a code server keep what it says of its definitions, until it has others.

    It is asked by the webserver and by the daemon, at a start at once. With 500 tables that is two
    seconds of CPU, and twice that while a flusher waits for its start. It has others, and another
    id, once it was told to load components anew whose definitions depend on a state of theirs.
    """
    answer = getattr(server, SERVER_ANSWER, None)
    if answer is None or hasattr(answer, "__wrapped__"):
        return
    kept, one_at_a_time = dict[tuple[Any, ...], str](), Lock()

    @wraps(answer)
    def once(self: Any, request: Any) -> str:
        now = self, getattr(self, SERVER_ID, None)
        asked = *now, request.serialized_repository_python_origin, request.defer_snapshots
        with one_at_a_time:
            if any(key[:2] != now for key in kept):
                kept.clear()  # of the former definitions
            if asked in kept:
                return kept[asked]
            with uncollected():
                said: str = answer(self, request)
            if "RepositoryErrorSnap" not in said[:200]:
                kept[asked] = said
            return said

    setattr(server, SERVER_ANSWER, once)


def _without_policy(key: dg.AssetKey) -> FreshnessStateRecord:
    return FreshnessStateRecord(
        entity_key=key,
        freshness_state=FreshnessState.NOT_APPLICABLE,
        updated_at=datetime.fromtimestamp(0, UTC),
        record_body=FreshnessStateRecordBody(metadata={}),
    )


class _Kept:
    """A storage with one database, whose engine is kept."""

    _engine: Engine

    @contextmanager
    def connect(self) -> Iterator[Connection]:
        with self._engine.begin() as connection:
            yield connection

    def dispose(self) -> None:
        self._engine.dispose()


class Runs(_Kept, SqliteRunStorage):
    """``history/runs.db``."""

    def __init__(self, conn_string: str) -> None:
        super().__init__(conn_string)
        self._engine = _kept(conn_string)


class Ticks(_Kept, SqliteScheduleStorage):
    """``schedules/schedules.db``. A tick asks four times whether it is migrated; it stays so."""

    def __init__(self, conn_string: str) -> None:
        super().__init__(conn_string)
        self._engine = _kept(conn_string)
        self._built = set[str]()

    def has_built_index(self, migration_name: str) -> bool:
        if migration_name not in self._built and super().has_built_index(migration_name):
            self._built.add(migration_name)
        return migration_name in self._built

    def _has_instigators_table(self, conn: Connection) -> bool:
        if "instigators" not in self._built and super()._has_instigators_table(conn):
            self._built.add("instigators")
        return "instigators" in self._built


class Events(SqliteEventLogStorage):
    """``history/runs/``: one file a run, and an index of what concerns assets."""

    def __init__(self, base_dir: str) -> None:
        super().__init__(base_dir)
        self._index = _kept(self.conn_string_for_shard(INDEX_SHARD_NAME))
        self._states = dict[str, tuple[int, FreshnessStateRecord]]()
        self._last = dict[str, tuple[str, dg.EventLogRecord]]()

    @contextmanager
    def _connect(self, shard: str) -> Iterator[Connection]:
        with self._db_lock:
            url = self.conn_string_for_shard(shard)
            engine = self._index if shard == INDEX_SHARD_NAME else _of_run(url)
            if not Path(self.path_for_shard(shard)).exists():  # another process removed the run
                self._initialized_dbs.discard(shard)
            if shard not in self._initialized_dbs:
                self._initdb(engine)
                self._initialized_dbs.add(shard)
            with engine.begin() as connection:
                yield connection

    def store_event(self, event: dg.EventLogEntry) -> None:
        """Store an asset's event without a run in the index alone, which such events are read from.

        Dagster has each of them a second time, in a file that it never reads them from.
        """
        if event.run_id != RUNLESS_RUN_ID or event.dagster_event_type not in ASSET_EVENTS:
            super().store_event(event)
            return
        with self.index_transaction() as connection:
            key = connection.execute(self.prepare_insert_event(event)).inserted_primary_key
            assert key is not None  # of an insert
            [number] = key
            self._store_asset_event_tags(connection, [event], [number])
            self._store_asset_event(connection, event, number)

    def get_freshness_state_records(
        self, keys: Sequence[dg.AssetKey]
    ) -> Mapping[dg.AssetKey, FreshnessStateRecord]:
        """As Dagster's, which parses the newest event of each asset anew.

        The daemon asks for those of all assets every 30 seconds, and hardly any has a new one.
        """
        newest = (
            select(_EVENTS.c.asset_key, func.max(_EVENTS.c.id))
            .where(_EVENTS.c.asset_key.in_([key.to_string() for key in keys]))
            .where(_EVENTS.c.dagster_event_type == DagsterEventType.FRESHNESS_STATE_CHANGE.value)
            .group_by(_EVENTS.c.asset_key)
        )
        with self.index_connection() as connection:
            found = [(str(key), int(number)) for key, number in connection.execute(newest)]
            fresh = [number for key, number in found if self._states.get(key, (0,))[0] != number]
            events = select(_EVENTS.c.asset_key, _EVENTS.c.id, _EVENTS.c.event)
            rows = connection.execute(events.where(_EVENTS.c.id.in_(fresh))).all() if fresh else []
        for key, number, event in rows:
            entry = deserialize_value(event, dg.EventLogEntry)
            self._states[key] = number, FreshnessStateRecord.from_event_log_entry(entry)
        states = (self._states[key][1] for key, _ in found if key in self._states)
        return {state.entity_key: state for state in states}

    def _get_latest_materialization_records(
        self, raw_asset_rows: Any
    ) -> Mapping[dg.AssetKey, dg.EventLogRecord | None]:
        """As Dagster's, for asset records; an event that is still the same isn't parsed again.

        The daemon asks for those of all tables every 30 seconds.
        """
        found, rest = dict[dg.AssetKey, dg.EventLogRecord | None](), []
        for row in raw_asset_rows:
            text, known = self._last.get(row["asset_key"], (None, None))
            if known is None or row["last_materialization"] != text or row["asset_details"]:
                rest.append(row)  # details: it was wiped once
            elif (key := dg.AssetKey.from_db_string(row["asset_key"])) is not None:
                found[key] = known
        if not rest:
            return found
        parsed = super()._get_latest_materialization_records(rest)
        for row in rest:
            key = dg.AssetKey.from_db_string(row["asset_key"])
            event = parsed.get(key) if key is not None else None
            if event is not None and row["last_materialization"]:
                self._last[row["asset_key"]] = row["last_materialization"], event
        return {**found, **parsed}

    def delete_events(self, run_id: str) -> None:
        """Delete the run's file, too, which Dagster leaves behind, empty and as large as it was."""
        super().delete_events(run_id)
        with self._db_lock:
            self._initialized_dbs.discard(run_id)
            for ending in ("", "-wal", "-shm"):
                Path(self.path_for_shard(run_id) + ending).unlink(missing_ok=True)

    def dispose(self) -> None:
        super().dispose()
        self._index.dispose()


class SqliteStorage(DagsterSqliteStorage):
    """Dagster's, which makes and migrates the files, with the storages above in its place."""

    def __init__(self, base_dir: str, inst_data: ConfigurableClassData | None = None) -> None:
        super().__init__(base_dir, inst_data)
        self._run_storage = Runs(self._run_storage._conn_string)
        self._schedule_storage = Ticks(self._schedule_storage._conn_string)
        self._event_log_storage = Events(self._event_log_storage._base_dir)

    @classmethod
    def from_config_value(
        cls, inst_data: ConfigurableClassData | None, config_value: Mapping[str, Any]
    ) -> Self:
        return cls.from_local(inst_data=inst_data, **config_value)


class Instance(dg.DagsterInstance):
    """Its storage is :class:`SqliteStorage`, where ``dagster.yaml`` names no other.

    A daemon that opens it fetches the code locations anew every four minutes, not each minute. It
    looks at freshness each minute, not each half, unless a variable sets that, and doesn't write
    of each asset without a freshness policy that it has none. A code server that opens it makes a
    list of its definitions once.
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        if (daemon := sys.modules.get(CONTROLLER)) is not None:
            setattr(daemon, RELOAD_INTERVAL, REFRESH_SECONDS)
        made: Any = getattr(sys.modules.get(FRESHNESS_MODULE), FRESHNESS_DAEMON, None)
        its_own = made.__init__.__defaults__ if made is not None else ()
        if len(its_own or ()) == 1 and FRESHNESS_INTERVAL_VARIABLE not in os.environ:
            made.__init__.__defaults__ = (FRESHNESS_SECONDS,)
        _answers_once(getattr(sys.modules.get(SERVER_MODULE), SERVER, None))

    def get_freshness_state_records(
        self, keys: Sequence[dg.AssetKey]
    ) -> Mapping[dg.AssetKey, FreshnessStateRecord]:
        """An asset of which nothing was written yet has no policy, as far as is known."""
        found = super().get_freshness_state_records(keys)
        return {key: found.get(key) or _without_policy(key) for key in keys}

    def dispose(self) -> None:
        """Dispose the storage of ticks, too; Dagster's own has nothing to be disposed."""
        super().dispose()
        if self.schedule_storage is not None:
            self.schedule_storage.dispose()

    @staticmethod
    def config_schema() -> Mapping[str, Any]:
        return {}

    @staticmethod
    def config_defaults(base_dir: str) -> Mapping[str, ConfigurableClassData | None]:
        where = yaml.dump({"base_dir": base_dir})
        storage = ConfigurableClassData(__name__, SqliteStorage.__name__, where)
        return {**InstanceRef.config_defaults(base_dir), "storage": storage}
