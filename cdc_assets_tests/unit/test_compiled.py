"""Loops that are compiled: kept from one process to the next where there is a place for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba.core import caching

from cdc_assets.compiled import compiled, copy_bytes, part


@part
def _twice(value: int) -> int:
    return 2 * value


def _sum(values: np.ndarray[tuple[int], np.dtype[np.int64]]) -> int:
    total = 0
    for value in values:
        total += _twice(int(value))
    return total


def test_a_loop_is_compiled_though_nothing_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: Any = compiled("int64(int64[::1])")(_sum)
    assert kept.stats.cache_path
    monkeypatch.setattr(caching.CompileResultCacheImpl, "_locator_classes", [])
    alone: Any = compiled("int64(int64[::1])")(_sum)
    assert not alone.stats.cache_path
    for loop in (kept, alone):
        assert loop is not _sum
        assert loop(np.arange(5)) == 20


def test_what_cannot_be_compiled_is_an_error() -> None:
    with pytest.raises(Exception, match="nopython"):
        compiled("int64(int64[::1])")(lambda values: values.no_such_thing())


def test_bytes_are_copied_from_where_to_where() -> None:
    @compiled("void(uint8[::1], uint8[::1])")
    def middle(target: np.ndarray, source: np.ndarray) -> None:
        copy_bytes(target, 1, source, 2, 3)

    target = np.zeros(6, np.uint8)
    middle(target, np.arange(10, 20, dtype=np.uint8))
    assert target.tolist() == [0, 12, 13, 14, 0, 0]
