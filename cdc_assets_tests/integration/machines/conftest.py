"""One site for the tests of a file; none where namespaces can't be made."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdc_assets_tests.support.machines import why_none
from cdc_assets_tests.support.ours import OURS, Open, open_site


@pytest.fixture
def opened(running: Open) -> Iterator[Open]:
    """Its machines do nothing yet; what they said is shown if the test fails."""
    yield running
    for name in OURS:
        sys.stdout.write(f"{name}: {running.site.log(name)[-6000:]}\n")


@pytest.fixture(scope="module")
def running() -> Iterator[Open]:
    if (why := why_none()) is not None:
        pytest.skip(f"no machines of their own: {why}")
    folder = Path(tempfile.mkdtemp(prefix="cdc_assets-machines-"))
    folder.chmod(0o755)
    try:
        with open_site(folder) as site:
            yield site
    finally:
        shutil.rmtree(folder)
