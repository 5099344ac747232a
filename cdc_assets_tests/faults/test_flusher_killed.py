"""SIGKILL at random points: the log has every change that committed, once, in commit order."""

from __future__ import annotations

import random
import time

import psutil
import pytest

from cdc_assets_tests.faults.ledger import TABLE, check, writing
from cdc_assets_tests.support.flusher import Bench, start_flusher

ROUNDS = 8


# The receiver is killed at every step in test_flusher_killed_at.
@pytest.mark.parametrize("victim", [pytest.param("receiver", marks=pytest.mark.soak), "decoder"])
def test_killed_anywhere_every_change_is_in_the_log_once(source: Bench, victim: str) -> None:
    source.execute(TABLE)
    options = {"flush_interval": "20ms", "flush_bytes": "100kB"}
    source.flush(source.config("public.t", **options))
    chance = random.Random(11)
    with writing(source):
        for _ in range(ROUNDS):
            child = start_flusher(source.config_file("public.t", **options))
            time.sleep(chance.uniform(0.5, 3.5))
            if victim == "decoder":
                decoders = psutil.Process(child.pid).children()  # none yet, perhaps
                for decoder in decoders:
                    decoder.kill()
                assert not decoders or child.wait(30) != 0
            child.kill()
            child.wait()
    source.flush(source.config("public.t", **options))
    assert check(source) > 5_000
