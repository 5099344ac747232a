"""One cluster for the tests of a file; none where namespaces can't be made."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdc_assets_tests.support.cluster import Running, running_cluster
from cdc_assets_tests.support.machines import why_none


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    if (why := why_none()) is not None:
        pytest.skip(f"no machines of their own: {why}")
    folder = Path(tempfile.mkdtemp(prefix="cdc_assets-cluster-"))
    try:
        with running_cluster(folder) as cluster:
            yield cluster
    finally:
        shutil.rmtree(folder)
