"""Several machines of ours: the turn passes, and each change is in the lake once."""

from __future__ import annotations

import shutil
import sys

import pytest

from cdc_assets_tests.integration.machines import flushers, lakes
from cdc_assets_tests.support.ours import Open

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]

needs_compiler = pytest.mark.skipif(
    shutil.which("cc") is None, reason="there is no C compiler (cc): clocks can't be set apart"
)


_TO, _FROM = ("database", "alpha"), ("alpha", "database")


@pytest.mark.parametrize(
    ("lost", "elsewhere"),
    [
        ((_TO, _FROM), False),
        ((_FROM,), False),
        ((_TO,), False),
        ((_TO, _FROM), True),
        ((("state", "alpha"), ("alpha", "state")), True),
    ],
    ids=["both ways", "from it", "to it", "from the source", "from the log"],
)
def test_a_flusher_cut_off_from_postgres_loses_its_turn(
    opened: Open, lost: tuple[tuple[str, str], ...], elsewhere: bool
) -> None:
    took = opened.hub.run(flushers.cut_off, opened.site, lost, elsewhere)
    sys.stdout.write(f"the turn passed in {took:.0f} s\n")
    assert took < flushers.TAKE_OVER_SECONDS


def test_a_flusher_cut_off_from_the_store_waits_with_its_turn(opened: Open) -> None:
    took = opened.hub.run(flushers.without_a_store, opened.site)
    sys.stdout.write(f"once it was told to stop, the turn passed in {took:.0f} s\n")
    assert took < flushers.TAKE_OVER_SECONDS


@needs_compiler
def test_the_turn_passes_between_clocks_that_are_apart(opened: Open) -> None:
    opened.hub.run(flushers.clocks_apart, opened.site)


@pytest.mark.spark
def test_a_follower_cut_off_amid_a_merge(opened: Open) -> None:
    opened.hub.run(lakes.cut_off_amid_a_merge, opened.site)


@pytest.mark.spark
def test_a_code_servers_flusher_has_the_turn_of_one_that_is_cut_off(opened: Open) -> None:
    opened.hub.run(lakes.beside_a_code_server, opened.site)


@pytest.mark.spark
@needs_compiler
def test_copies_merges_and_care_by_clocks_that_are_apart(opened: Open) -> None:
    opened.hub.run(lakes.merged_by_clocks_apart, opened.site)
