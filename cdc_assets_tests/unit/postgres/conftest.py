from __future__ import annotations

from collections.abc import Iterator

import pytest

from cdc_assets.postgres.copy_out import session


@pytest.fixture(scope="module")
def small_batches() -> Iterator[None]:
    """What COPY sends is read by 256 bytes, so that there are batches at all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "BATCH_BYTES", 256)
        yield
