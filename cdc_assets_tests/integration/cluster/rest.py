"""A REST catalog on the platform's machine, by which a cluster works.

It wants OAuth2, and lends keys of the lake's store to whoever loads a table, and to Spark others
when these end. Nobody has any of its own: the configuration's key is taken by the store of staged
files alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cdc_assets.lake.spark.session import open_session
from cdc_assets_tests.integration.cluster.deeds import ORDERS, Source, about_executors, source
from cdc_assets_tests.support.cluster import NODES, PLATFORM, WORKERS, Cluster
from cdc_assets_tests.support.lending import Lending, lending
from cdc_assets_tests.support.rest_faults import (
    done_and_broken,
    done_and_cut_off,
    each_in_turn,
    refused,
    stranger,
)
from cdc_assets_tests.support.s3 import object_store

_WORKERS = {NODES[name] for name in WORKERS}
# How long keys and tokens live, where they end.
SECONDS = 20.0
# What storing a file takes while a copy is slow: about thirty of them, by two workers.
_SLOW_SECONDS = 3.0


def keys_that_end(cluster: Cluster) -> None:
    with _source(cluster, SECONDS) as (opened, catalog):
        assert about_executors(opened.lake.config) == {}
        _copy_slowly(opened, catalog)
        for step in (_change_and_merge, Source.care, Source.copy_anew):
            step(opened)
            opened.compare()
        assert not opened.store.refused
        assert catalog.server.renewed > _WORKERS


def commits_that_are_met(cluster: Cluster) -> None:
    with _source(cluster, 3600.0) as (opened, catalog):
        opened.copy()
        lake = opened.lake
        other = open_session(lake.config)
        somebody = stranger(other, lake.lake_table(ORDERS))
        for meets in (refused, done_and_broken, done_and_cut_off, somebody):
            for _ in each_in_turn(catalog.server, meets, opened.change, lake.drain_all):
                pass
            opened.compare()
        other.stop()


@contextmanager
def _source(cluster: Cluster, seconds: float) -> Iterator[tuple[Source, Lending]]:
    access = {"host": PLATFORM, "token_seconds": seconds, "renews": True}
    with (
        TemporaryDirectory() as folder,
        object_store(host=PLATFORM) as store,
        lending(Path(folder), store, seconds, **access) as catalog,
        source(cluster, chunk_pages=20, lake=catalog.settings) as opened,
    ):
        yield opened, catalog


def _copy_slowly(opened: Source, catalog: Lending) -> None:
    """A copy that outlives what its tasks were lent; only these are ever refused for it."""

    def slowly(handler: Any) -> bool:
        if handler.command == "PUT" and handler.client_address[0] in _WORKERS:
            time.sleep(_SLOW_SECONDS)
        return False

    catalog.store.fault, began = slowly, time.monotonic()
    opened.copy()
    catalog.store.fault = None
    assert time.monotonic() - began > SECONDS
    assert {who.split()[0] for who in catalog.store.refused} <= _WORKERS
    assert catalog.store.refused, "keys were over in the midst of it"


def _change_and_merge(opened: Source) -> None:
    opened.change()
    opened.lake.drain_all()
