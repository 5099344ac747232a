"""What two flushers do on machines of their own, and what the hub sees of it.

The hub writes into the source meanwhile, and afterwards holds the log against what it wrote.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cdc_assets.config.source import SourceConfig
from cdc_assets.flusher.reach import reach
from cdc_assets.log.sessions.flusher_status import active_flusher
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.slots import current_lsn
from cdc_assets_tests.faults.ledger import TABLE, check, writing
from cdc_assets_tests.support.flusher import Bench, bench
from cdc_assets_tests.support.ours import ADDRESSES, Site
from cdc_assets_tests.support.s3 import ObjectStore, object_store
from cdc_assets_tests.support.waiting import wait_for

# What a user may rely on.
TAKE_OVER_SECONDS = 60
# For so long is looked whether something doesn't happen.
_CALM_SECONDS = 15


@dataclass
class Scene:
    """A source with a log; ``stored`` is who wrote to the object store last, and when."""

    site: Site
    source: Bench
    store: ObjectStore
    config: SourceConfig
    file: Path
    stored: dict[str, float] = field(default_factory=dict)

    def start(self, *names: str) -> None:
        """Start flushers, each once the one before has the turn or waits for it."""
        for name in names:
            before = self.waits(name)
            self.site.start(name, "cdc_assets", "--config", str(self.file), "flush")
            wait_for(lambda: self.has_turn(name) or self.waits(name) > before)  # noqa: B023

    def has_turn(self, name: str) -> bool:
        return has_turn(self.config, name)

    def waits(self, name: str) -> int:
        """How often it has begun to wait for its turn."""
        return self.site.log(name).count("); waiting")

    def state(self) -> str:
        """What the flusher that has the turn says of itself."""
        with Pipeline.open(self.config) as pipeline:
            report, _ = pipeline.store.flusher_report() or ({}, None)
        return str(report.get("state"))

    def goes_on(self, seconds: float = 60) -> float:
        """Wait until the log moves; for how long."""
        began, before = time.monotonic(), self.source.flushed()
        wait_for(lambda: self.source.flushed() > before, seconds)
        return time.monotonic() - began

    def passes_to(self, name: str) -> float:
        """Wait until the log moves by another one's hands; for how long."""
        began = time.monotonic()
        wait_for(lambda: self.has_turn(name), 2 * TAKE_OVER_SECONDS)
        self.goes_on(2 * TAKE_OVER_SECONDS)
        return time.monotonic() - began

    def ends_well(self) -> None:
        """All that was written is in the log: each change once, in order."""
        assert check(self.source)
        assert self.source.confirmed() <= self.source.flushed()


def has_turn(config: SourceConfig, name: str) -> bool:
    """Whether the flusher that has the turn is on that machine."""
    with Pipeline.open(config) as pipeline:
        return str(active_flusher(pipeline.store) or "").endswith(f" on {name}")


@contextmanager
def scene(site: Site, *, elsewhere: bool = False) -> Iterator[Scene]:
    """A source with the table that ``ledger`` writes to, which nobody flushes yet.

    ``elsewhere``: its log is on another server.
    """
    for name in ("alpha", "beta"):
        (site.folder / f"{name}.log").unlink(missing_ok=True)
    with (
        object_store(host=ADDRESSES["hub"]) as store,
        bench(site.state_dsn, "kept", site.folder) as state,
        bench(site.dsn, "passed", site.folder, state.dsn if elsewhere else None) as source,
    ):
        source.s3 = store.settings
        source.execute(TABLE)
        config = source.config("public.t", flush_interval="100ms")
        file = source.config_file("public.t", flush_interval="100ms")
        made = Scene(site, source, store, config, file)
        names = {address: name for name, address in ADDRESSES.items()}

        def watch(handler: Any) -> None:
            if handler.command in ("PUT", "POST"):
                made.stored[names[handler.client_address[0]]] = time.monotonic()

        source.flush(config)
        store.watch = watch
        try:
            yield made
        finally:
            site.end()


def cut_off(site: Site, lost: tuple[tuple[str, str], ...], elsewhere: bool) -> float:
    """One that loses its line to Postgres loses its turn; in how long. It waits for the next."""
    with scene(site, elsewhere=elsewhere) as made:
        made.start("alpha", "beta")
        with writing(made.source, writers=2, pause=0.05):
            made.goes_on()
            waits = made.waits("alpha")
            for one, other in lost:
                site.lose(one, other)
            took = made.passes_to("beta")
            time.sleep(_CALM_SECONDS)
            site.mend()
            mended = time.monotonic()
            wait_for(lambda: made.waits("alpha") > waits, 2 * TAKE_OVER_SECONDS)
            _stays(made, "beta", mended)
            site.machines["beta"].stop()
            made.passes_to("alpha")
        until_written(made.source, made.config)
        site.machines["alpha"].stop()
        made.ends_well()
        return took


def _stays(made: Scene, name: str, since: float) -> None:
    """It keeps the turn, and nobody else has stored anything since."""
    time.sleep(_CALM_SECONDS)
    made.goes_on()
    assert made.has_turn(name)
    late = {other for other, at in made.stored.items() if at > since}
    assert late == {name}, made.stored


def until_written(source: Bench, config: SourceConfig) -> None:
    """Wait until all that was written is in the log."""
    with Pipeline.open(config) as pipeline:
        reach(pipeline, current_lsn(source.connection), seconds=60)


def without_a_store(site: Site) -> float:
    """One that loses its line to the store waits with its turn; told to stop, it gives it up."""
    with scene(site) as made:
        made.start("alpha", "beta")
        with writing(made.source, writers=2, pause=0.05):
            made.goes_on()
            site.cut("alpha", "hub")
            wait_for(lambda: made.state() == "retrying staging", 2 * TAKE_OVER_SECONDS)
            before = made.source.flushed()
            time.sleep(3 * _CALM_SECONDS)  # longer than a silence lasts
            assert made.has_turn("alpha")
            assert made.source.flushed() == before
            site.mend()
            made.goes_on()
            assert made.has_turn("alpha")
            site.cut("alpha", "hub")
            wait_for(lambda: made.state() == "retrying staging", 2 * TAKE_OVER_SECONDS)
            began = time.monotonic()
            site.machines["alpha"].stop()
            made.passes_to("beta")
            took = time.monotonic() - began
        until_written(made.source, made.config)
        site.machines["beta"].stop()
        made.ends_well()
        return took


def clocks_apart(site: Site) -> None:
    """The turn passes to a clock ten minutes earlier, and back; ages are told rightly to others."""
    site.set_clocks(alpha=300, beta=-300, office=300)
    with scene(site) as made:
        made.start("alpha", "beta")
        with writing(made.source, writers=2, pause=0.05):
            for name, other in (("alpha", "beta"), ("beta", "alpha")):
                made.goes_on()
                _told_rightly(made)
                waits = made.waits(name)
                site.cut(name, "database")
                took = made.passes_to(other)
                assert took < TAKE_OVER_SECONDS, took
                _told_rightly(made)
                site.mend()
                wait_for(lambda: made.waits(name) > waits, 2 * TAKE_OVER_SECONDS)  # noqa: B023
        until_written(made.source, made.config)
        site.machines["alpha"].stop()
        site.machines["beta"].stop()
        made.ends_well()


def _told_rightly(made: Scene) -> None:
    status = ("cdc_assets", "--config", str(made.file), "status", "--json")
    told = json.loads(made.site.run("office", *status).stdout)["flusher"]
    assert told["state"] == "streaming", told
    ages = [told[key] for key in ("lag_seconds", "flushed_seconds_ago", "told_seconds_ago")]
    assert all(0 <= age < 30 for age in ages), told
