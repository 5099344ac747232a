"""What ``check`` says of a source that is a hot standby (``postgres.standby``).

A logical slot there needs rows of the catalog that the primary's VACUUM may remove: it is lost with
them, unless the standby tells the primary what it needs, and that remembers it. What is published
is the primary's to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import LiteralString

from cdc_assets.config.source import SourceConfig
from cdc_assets.messages.findings import Finding
from cdc_assets.postgres.session.connect import Connection
from cdc_assets.postgres.slots import on_standby

# The first version in which a standby can have logical slots.
DECODES = 160000
_SETTINGS: LiteralString = """
select current_setting('hot_standby_feedback') = 'on', current_setting('primary_slot_name') <> '',
       current_setting('recovery_min_apply_delay') <> '0',
       pg_catalog.has_function_privilege('pg_catalog.pg_wal_replay_pause()', 'execute')
       and pg_catalog.has_function_privilege('pg_catalog.pg_wal_replay_resume()', 'execute'),
       pg_catalog.pg_is_wal_replay_paused(), pg_catalog.pg_last_wal_receive_lsn() is null,
       current_setting('max_standby_streaming_delay'),
       pg_catalog.quote_ident(current_user::text)
"""


def standby_findings(connection: Connection, config: SourceConfig) -> Iterator[Finding]:
    """Of the server, if it is a standby that is meant to be one."""
    if not on_standby(connection):
        return
    if connection.info.server_version < DECODES:
        yield Finding(
            "standby_version",
            "error",
            "before Postgres 16 nothing can be streamed from a standby.",
            "Give the primary's address in postgres.dsn, without postgres.standby.",
        )
        return
    row = connection.execute(_SETTINGS).fetchone()
    assert row is not None
    feedback, slot, delayed, may_stop, paused, archive, delay, role = row
    if not feedback or not slot:
        lacking = "hot_standby_feedback is off" if not feedback else "primary_slot_name is empty"
        yield Finding(
            "standby_feedback",
            "warning",
            f"{lacking} on the standby: the primary doesn't keep what the slot {config.slot} needs"
            " of its catalog, at least while they aren't connected. A VACUUM there then invalidates"
            " the slot, and every table has to be copied anew.",
            "On the primary: select pg_create_physical_replication_slot('cdc_standby', true);"
            " on the standby: alter system set primary_slot_name = 'cdc_standby'; alter system set"
            " hot_standby_feedback = on; select pg_reload_conf();",
        )
    if not feedback and delay != "-1":
        yield Finding(
            "replica_conflicts",
            "warning",
            "the standby ends whoever still needs rows that VACUUM has removed at the primary,"
            f" after {delay} (max_standby_streaming_delay): a copy or comparison begins anew then.",
            "On the standby: alter system set hot_standby_feedback = on; (VACUUM at the primary"
            " keeps such rows) or alter system set max_standby_streaming_delay = -1; (replay waits,"
            " and the stream with it) select pg_reload_conf();",
        )
    if not may_stop:
        yield Finding(
            "replica_not_paused",
            "warning",
            f"the role {role} may not stop the standby's replay for a moment: without that, tables"
            " without a key, or whose lake table isn't a mirror, aren't copied, and nothing is"
            " compared (verify).",
            "On the primary: grant execute on function pg_wal_replay_pause(),"
            f" pg_wal_replay_resume() to {role};",
        )
    if delayed or paused:
        what = "replays with a delay (recovery_min_apply_delay)" if delayed else "has its replay"
        yield Finding(
            "standby_lags",
            "warning",
            f"the standby {what}{'' if delayed else ' paused'}: nothing newer is streamed.",
            "select pg_wal_replay_resume();"
            if not delayed
            else "alter system set"
            " recovery_min_apply_delay = 0; select pg_reload_conf(); unless it is meant so",
        )
    if archive:
        yield Finding(
            "standby_archive",
            "error",
            "the standby has received no WAL from its primary since it was started, but from an"
            " archive at most: what it shows has no known end then.",
            "Have it stream from the primary (primary_conninfo), or wait until it is connected.",
        )
