"""Each test begins as a process does: nobody has given a configuration yet."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cdc_assets.cli.pasted import called_by


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    called_by(None, [])
    yield
    called_by(None, [])
