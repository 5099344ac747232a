"""The restart record's comparisons, as pure functions: a good failover isn't an older state."""

from __future__ import annotations

from dataclasses import replace

from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.slots import SlotStatus
from cdc_assets.readiness.source.record import PublishedAs, Recorded, SlotRestart, Source
from cdc_assets.readiness.source.restart_record import compare

SLOT = SlotStatus("s", "pgoutput", None, Lsn(900), "reserved", 0, "app", Lsn(400))
KNOWN = Recorded(Lsn(1000), "7", 1, "5", "6", SlotRestart(Lsn(500), 1))
NOW = Source(False, "7", 1, Lsn(2000), "5", "app", "6", SLOT)


def codes(known: Recorded, now: Source) -> list[str]:
    return [finding.code for finding in compare(known, now, "s", "p")]


def test_a_slot_that_begins_earlier_on_the_same_timeline_is_an_older_state() -> None:
    assert codes(KNOWN, NOW) == ["slot_behind"]


def test_a_promoted_standby_may_have_the_slot_as_it_was_earlier() -> None:
    promoted = replace(NOW, timeline=2, left_at=Lsn(1500))
    assert codes(KNOWN, promoted) == []
    # Also once the new timeline is written down, and until the slot's beginning there is.
    assert codes(replace(KNOWN, timeline=2), promoted) == []
    known = replace(KNOWN, timeline=2, slot_restart=SlotRestart(Lsn(450), 2))
    assert codes(known, promoted) == ["slot_behind"]


def test_a_promoted_standby_that_lacks_the_end_is_named() -> None:
    assert codes(KNOWN, replace(NOW, timeline=2, left_at=Lsn(999))) == ["timeline_diverged"]


def test_another_timeline_of_the_same_number_is_named() -> None:
    known = replace(KNOWN, timeline=2, slot_restart=None)
    assert codes(known, replace(NOW, timeline=2, left_at=Lsn(999))) == ["timeline_diverged"]
    assert codes(known, replace(NOW, timeline=2, left_at=Lsn(1000))) == []


def test_a_standby_that_is_behind_may_follow_to_the_recorded_timeline_again() -> None:
    known = replace(KNOWN, timeline=2, slot_restart=None)
    now = replace(NOW, in_recovery=True, end=Lsn(800), received=Lsn(800), left_at=Lsn(900))
    found = compare(known, now, "s", "p", standby=True)
    assert [finding.code for finding in found] == ["standby_behind_log"]
    now = replace(now, end=Lsn(1000), received=Lsn(1000))
    found = compare(known, now, "s", "p", standby=True)
    assert [finding.code for finding in found] == ["timeline_diverged"]


def test_a_promoted_standby_that_lacks_what_a_copy_has_read_is_named() -> None:
    known = replace(KNOWN, read=Lsn(1600))
    assert codes(known, replace(NOW, timeline=2, left_at=Lsn(1700))) == []
    assert codes(known, replace(NOW, timeline=2, left_at=Lsn(1500))) == ["timeline_diverged"]


def test_a_standby_that_lags_behind_what_copies_may_have_read_goes_on() -> None:
    """An LSN above what was read there is that of the WAL it had; ``end`` is replayed."""
    known = replace(KNOWN, read=Lsn(1600), slot_restart=None)
    lags = replace(NOW, in_recovery=True, end=Lsn(1200), received=Lsn(1600))

    def found(now: Source) -> list[str]:
        return [finding.code for finding in compare(known, now, "s", "p", standby=True)]

    assert found(lags) == []
    assert found(replace(lags, received=Lsn(1500))) == ["standby_behind_log"]  # it was restarted
    assert found(replace(lags, end=Lsn(999))) == ["standby_behind_log"]


def test_what_is_written_down_is_read_again() -> None:
    assert SlotRestart.parse(str(SlotRestart(Lsn.parse("1/2A"), 3))) == SlotRestart(
        Lsn.parse("1/2A"), 3
    )
    assert SlotRestart.parse("1/2A") is None  # without a timeline it can't be compared


def test_a_publication_that_looks_as_before_and_was_altered_meanwhile_was_put_back() -> None:
    before = PublishedAs.parse("entry 16402/16390 10 ar/745")
    assert PublishedAs.parse(str(before)) == before
    assert not before.was_put_back(before)
    assert before.was_put_back(replace(before, version="750"))
    # Another owner, or another shape that is judged by itself, says why it was altered.
    assert not before.was_put_back(replace(before, publication="16390 11 ar", version="750"))
    # What an earlier version wrote down tells nothing of it.
    assert not PublishedAs.parse("entry 16402").was_put_back(before)
