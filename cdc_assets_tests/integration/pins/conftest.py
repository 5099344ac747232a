"""Publications are made on Postgres 16, whose decoding is the stricter one."""

from __future__ import annotations

import pytest


@pytest.fixture
def postgres_version() -> int:
    """Before 18 the server minds what was changed before a publication was made."""
    return 16
