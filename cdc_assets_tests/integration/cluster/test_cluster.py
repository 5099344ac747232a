"""A source whose Spark is a cluster, of machines that share nothing with the platform."""

from __future__ import annotations

import pytest

from cdc_assets_tests.integration.cluster import deeds, rest
from cdc_assets_tests.support.cluster import Running

pytestmark = [pytest.mark.spark, pytest.mark.soak]


def test_a_source_is_copied_merged_cared_for_and_compared_on_a_cluster(running: Running) -> None:
    running.run(deeds.all_of_it)


def test_check_names_each_executor_and_what_it_lacks(running: Running) -> None:
    running.run(deeds.probed)


def test_a_worker_killed_in_the_midst_of_each_costs_nothing_but_time(running: Running) -> None:
    running.run(deeds.workers_killed)


def test_a_server_killed_in_the_midst_leaves_what_its_successor_goes_on_with(
    running: Running,
) -> None:
    running.run(deeds.server_killed)


def test_a_minute_without_a_line_from_the_cluster_to_postgres(running: Running) -> None:
    running.run(deeds.cut_off, 60)


def test_keys_that_a_catalog_lends_end_in_the_midst_of_a_copy(running: Running) -> None:
    running.run(rest.keys_that_end)


def test_what_each_commit_of_a_merge_meets_at_its_catalog_costs_no_row(running: Running) -> None:
    running.run(rest.commits_that_are_met)
