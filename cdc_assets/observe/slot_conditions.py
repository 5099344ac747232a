"""Conditions of the source: WAL that a slot keeps, transaction IDs, pins, a standby's replay."""

from __future__ import annotations

from collections.abc import Iterator

from cdc_assets.config.alerts import SlotLimitsConfig, WindowConfig
from cdc_assets.observe.condition import COMMAND, FAIL, WARN, Condition, Limits, ago
from cdc_assets.observe.facts import Facts
from cdc_assets.postgres.slots import SlotStatus

# Shares of max_slot_wal_keep_size: with less than this left somebody has to hurry.
_SAFE_WARN, _SAFE_FAIL = 0.5, 0.2
# Dead rows pile up at the source for as long as a snapshot is held; after a day that is felt.
_PIN_HELD = Limits(6 * 3600.0, 24 * 3600.0)


def slot(facts: Facts, limits: SlotLimitsConfig, name: str) -> Iterator[Condition]:
    if facts.status is None or facts.status.flusher.flushed_lsn is None:
        return  # nothing was streamed yet
    slot, anew = facts.status.slot, f"`{COMMAND} resync --all` (it copies every table)"
    if slot is None or slot.wal_status == "lost":
        gone = "is gone" if slot is None else "lost the WAL that it needs"
        yield Condition(
            "slot:state",
            f"the replication slot {name} {gone}",
            "changes since are missing from the lake",
            f"Find out who did it, then {anew}.",
        )
        return
    if slot.wal_status in ("unreserved", "extended"):
        unreserved = slot.wal_status == "unreserved"
        yield Condition(
            "slot:state",
            f"the replication slot {name} "
            + ("is about to lose its WAL" if unreserved else "keeps more WAL than max_wal_size"),
            f"wal_status {slot.wal_status}, {slot.retained_bytes / 1e6:,.0f} MB kept",
            f"See why the flusher doesn't acknowledge (`{COMMAND} status`), or raise"
            " max_slot_wal_keep_size.",
            FAIL if unreserved else WARN,
        )
    yield from _slot_sizes(slot, limits, name)
    if slot.active_pid is None:
        since = None if slot.inactive_seconds is None else ago(facts, slot.inactive_seconds)
        yield Condition(
            "slot:inactive",
            f"nobody reads from the replication slot {name}",
            f"{slot.retained_bytes / 1e6:,.0f} MB of WAL kept",
            f"Start a flusher; a source that is given up: `{COMMAND} drop-source`.",
            Limits.of(limits.inactive),
            since,
        )


def _slot_sizes(slot: SlotStatus, limits: SlotLimitsConfig, name: str) -> Iterator[Condition]:
    if slot.retained_bytes >= limits.retained_warn:
        yield Condition(
            "slot:retained",
            f"the replication slot {name} keeps much WAL at the source",
            f"{slot.retained_bytes / 1e9:,.2f} GB (failure from {limits.retained_fail / 1e9:,.0f}"
            " GB on)",
            f"`{COMMAND} status` says what the flusher waits for. Long transactions at the source"
            " keep WAL, too (pg_stat_activity, pg_prepared_xacts).",
            FAIL if slot.retained_bytes >= limits.retained_fail else WARN,
        )
    if slot.safe_bytes is not None and slot.keep_bytes:
        left = slot.safe_bytes / slot.keep_bytes
        if left < _SAFE_WARN:
            yield Condition(
                "slot:safe",
                f"the replication slot {name} will lose its WAL",
                f"{max(0, slot.safe_bytes) / 1e6:,.0f} MB of max_slot_wal_keep_size"
                f" ({slot.keep_bytes / 1e6:,.0f} MB) are left",
                "Raise max_slot_wal_keep_size at once (a reload is enough), then see why the"
                " flusher doesn't acknowledge.",
                FAIL if left < _SAFE_FAIL else WARN,
            )
    if slot.xmin_age is not None and slot.xmin_age >= limits.xmin_age_warn:
        yield Condition(
            "slot:xmin",
            f"the replication slot {name} holds back the vacuum of the source's catalog",
            f"catalog_xmin is {slot.xmin_age:,} transactions old",
            "Start the flusher, or end the long transaction that holds the slot back"
            " (pg_stat_activity, pg_prepared_xacts).",
            FAIL if slot.xmin_age >= limits.xmin_age_fail else WARN,
        )


def pins(facts: Facts, limits: SlotLimitsConfig) -> Iterator[Condition]:
    for pin in facts.status.pins if facts.status is not None else ():
        tables = ", ".join(pin.tables) or "no table any more"
        detail = f"{pin.xmin_age:,} transactions, {pin.seconds:.0f} s: {tables}"
        what = "a snapshot that is being copied holds back the vacuum of the source"
        remedy = f"`{COMMAND} status` says how far the copies are; more workers copy faster."
        since = ago(facts, pin.seconds)
        yield Condition(f"pin:{tables}", what, detail, remedy, _PIN_HELD, since)
        if pin.xmin_age >= limits.xmin_age_warn:
            grade = FAIL if pin.xmin_age >= limits.xmin_age_fail else WARN
            yield Condition(f"pin:{tables}", what, detail, remedy, grade, since)


def standby(facts: Facts, limits: WindowConfig) -> Iterator[Condition]:
    replay = facts.status.standby if facts.status is not None else None
    if replay is None:
        return
    if replay.paused:
        yield Condition(
            "standby:replay",
            "the standby that is streamed from has its replay paused",
            str(replay),
            "Nothing newer is streamed: select pg_wal_replay_resume(); on the standby.",
            Limits.of(limits),
        )
    elif replay.behind_seconds is not None:
        yield Condition(
            "standby:replay",
            "the standby that is streamed from lags behind its primary",
            str(replay),
            "See who holds up its replay (pg_stat_activity there), and recovery_min_apply_delay.",
            Limits.of(limits),
            ago(facts, replay.behind_seconds),
        )
    if not replay.connected:
        yield Condition(
            "standby:receiver",
            "the standby that is streamed from isn't connected to its primary",
            str(replay),
            "See its log, and pg_stat_replication on the primary. Without primary_slot_name and"
            " hot_standby_feedback the slot may be lost meanwhile.",
            WARN,
        )
