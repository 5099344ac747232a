"""What is taken from inside Dagster: nothing else here imports ``dagster._…``, or names it.

``unit/dagster/test_internals.py`` holds that, and that each name is there.
"""

from dagster._core.definitions.freshness import (
    FreshnessState,
    FreshnessStateRecord,
    FreshnessStateRecordBody,
)
from dagster._core.events import ASSET_EVENTS, DagsterEventType
from dagster._core.instance import RUNLESS_RUN_ID
from dagster._core.instance.ref import InstanceRef
from dagster._core.remote_origin import RemoteRepositoryOrigin
from dagster._core.scheduler.instigation import InstigatorType, TickStatus
from dagster._core.storage.asset_check_execution_record import (
    AssetCheckExecutionRecord,
    AssetCheckExecutionRecordStatus,
)
from dagster._core.storage.event_log import SqliteEventLogStorage
from dagster._core.storage.event_log.schema import (
    AssetCheckExecutionsTable,
    AssetEventTagsTable,
    SqlEventLogStorageTable,
)
from dagster._core.storage.event_log.sql_event_log import SqlEventLogStorage
from dagster._core.storage.event_log.sqlite.sqlite_event_log import INDEX_SHARD_NAME
from dagster._core.storage.runs import SqliteRunStorage
from dagster._core.storage.schedules import SqliteScheduleStorage
from dagster._core.storage.sqlite import SQLITE_BUSY_TIMEOUT_SECONDS
from dagster._core.storage.sqlite_storage import DagsterSqliteStorage
from dagster._grpc.types import ExecuteExternalJobArgs
from dagster._serdes import ConfigurableClassData, deserialize_value, serialize_value

# By name is reached what is of use only in a process that has it: the daemon, a code server.
DAEMON = "dagster._daemon"  # as `python -m` runs it
CONTROLLER, RELOAD_INTERVAL = "dagster._daemon.controller", "RELOAD_WORKSPACE_INTERVAL"
FRESHNESS_MODULE, FRESHNESS_DAEMON = "dagster._daemon.freshness", "FreshnessDaemon"
FRESHNESS_INTERVAL_VARIABLE = "FRESHNESS_DAEMON_INTERVAL_SECONDS"
SERVER_MODULE, SERVER = "dagster._grpc.server", "DagsterApiServer"
# Of a server: what says its definitions, its id, which is another one when it has others, and the
# event that is set when it is told to end; and how it starts the processes of its runs.
SERVER_ANSWER, SERVER_ID = "_get_serialized_external_repository_data", "_server_id"
SERVER_TOLD_TO_END = "_shutdown_once_executions_finish_event"
SERVER_PROCESSES = "_mp_ctx"
# What the process of a run begins with.
RUN_MODULE = "dagster._grpc.impl"
# Of a tick's context.
CONTEXT_REPOSITORY = "_repository_def"

__all__ = [
    "ASSET_EVENTS",
    "CONTEXT_REPOSITORY",
    "CONTROLLER",
    "DAEMON",
    "FRESHNESS_DAEMON",
    "FRESHNESS_INTERVAL_VARIABLE",
    "FRESHNESS_MODULE",
    "INDEX_SHARD_NAME",
    "RELOAD_INTERVAL",
    "RUNLESS_RUN_ID",
    "RUN_MODULE",
    "SERVER",
    "SERVER_ANSWER",
    "SERVER_ID",
    "SERVER_MODULE",
    "SERVER_PROCESSES",
    "SERVER_TOLD_TO_END",
    "SQLITE_BUSY_TIMEOUT_SECONDS",
    "AssetCheckExecutionRecord",
    "AssetCheckExecutionRecordStatus",
    "AssetCheckExecutionsTable",
    "AssetEventTagsTable",
    "ConfigurableClassData",
    "DagsterEventType",
    "DagsterSqliteStorage",
    "ExecuteExternalJobArgs",
    "FreshnessState",
    "FreshnessStateRecord",
    "FreshnessStateRecordBody",
    "InstanceRef",
    "InstigatorType",
    "RemoteRepositoryOrigin",
    "SqlEventLogStorage",
    "SqlEventLogStorageTable",
    "SqliteEventLogStorage",
    "SqliteRunStorage",
    "SqliteScheduleStorage",
    "TickStatus",
    "deserialize_value",
    "serialize_value",
]
